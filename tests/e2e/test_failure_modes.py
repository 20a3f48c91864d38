# SPDX-License-Identifier: Apache-2.0
"""docs/failure-modes.md says what real frontends do."""

import pytest

from tests.support.failure_modes import FRONTENDS, MODES, documented, observed

pytestmark = [pytest.mark.failure_modes, pytest.mark.timeout(400)]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("mode", MODES)
def test_it_goes_as_documented(mode: str, frontend: str) -> None:
    assert observed(mode, frontend) == documented(mode, frontend)
