# SPDX-License-Identifier: Apache-2.0
"""What every test may rely on."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see only the settings they make themselves."""
    for name in list(os.environ):
        if name.startswith("MOCKENGINE_"):
            monkeypatch.delenv(name)
