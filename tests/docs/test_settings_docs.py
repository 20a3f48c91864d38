# SPDX-License-Identifier: Apache-2.0
"""docs/settings.md says what the settings are."""

import re
from pathlib import Path

import pytest

from mockengine.settings import describe
from mockengine.settings_docs import main, written_anew
from mockengine.settings_sources import SettingsError, load

_PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_table_is_up_to_date() -> None:
    assert written_anew(_PAGE) == _PAGE.read_text(encoding="utf-8"), (
        "docs/settings.md differs from mockengine/settings.py; "
        "write it anew with: python -m mockengine.settings_docs docs/settings.md"
    )


def test_the_table_names_every_setting_once() -> None:
    keys = re.findall(r"^\| `(\w+)`<br>", _PAGE.read_text(encoding="utf-8"), re.MULTILINE)

    assert keys == list(describe())


def test_the_example_of_problems_is_what_is_printed() -> None:
    with pytest.raises(SettingsError) as caught:
        load(
            ["--start-rank", "3", "--data-parallel-size", "2"],
            {"MOCKENGINE_BLOCK_SIZE": "24", "MOCKENGINE_SEDE": "7"},
        )

    assert f"\nmockengine: {caught.value}\n```" in _PAGE.read_text(encoding="utf-8")


def test_writing_the_page_anew_keeps_what_people_wrote(tmp_path: Path) -> None:
    copy = tmp_path / "settings.md"
    page = _PAGE.read_text(encoding="utf-8")
    copy.write_text(page.replace("Number of data-parallel ranks", "Anything"), encoding="utf-8")

    assert main([str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == page


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "settings.md"
    page.write_text("# Settings\n", encoding="utf-8")

    with pytest.raises(ValueError, match="the page has no place for the table"):
        written_anew(page)
