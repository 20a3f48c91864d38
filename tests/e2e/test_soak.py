# SPDX-License-Identifier: Apache-2.0
"""Two minutes of everything at once."""

import pytest

from tests.support.soak import Soak

SECONDS = 120


@pytest.mark.failure_modes
@pytest.mark.timeout(400)
def test_everything_at_once_balances_in_the_end() -> None:
    accounts = Soak(SECONDS).run()
    assert accounts.frontends > 3
    assert sum(accounts.done.values()) > 1_000
    # Each of them was there, and answered.
    doings = ("complete", "stream", "leave", "call", "look", "change", "fault")
    assert all(accounts.done[f"{doing}: 200"] > 0 for doing in doings), accounts.done
    assert accounts.done["complete: 503"] > 0, accounts.done
