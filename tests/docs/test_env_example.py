# SPDX-License-Identifier: Apache-2.0
""".env.example lists what docker compose can be told, and every line of it works."""

import re
from pathlib import Path

import pytest

from mockengine.settings import describe
from mockengine.settings_docs import COMPOSE_DEFAULTS, main, written_anew
from mockengine.settings_sources import load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / ".env.example"


def _lines() -> dict[str, str]:
    """Every variable of the example with its value, in order."""
    return dict(re.findall(r"^#([A-Z_]+)=(.*)$", EXAMPLE.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("name", [".env.example", "docker-compose.yml"])
def test_the_written_part_is_up_to_date(name: str) -> None:
    path = ROOT / name

    assert written_anew(path) == path.read_text(encoding="utf-8"), (
        f"{name} differs from mockengine/settings.py; write it anew with: make docs"
    )


def test_it_names_every_setting_once() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    named = [name for name in re.findall(r"^#([A-Z_]+)=", text, re.MULTILINE) if name.startswith("MOCKENGINE_")]

    assert named == [setting.variable for setting in describe().values()]


def test_nothing_is_set_until_somebody_takes_the_mark_away() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()

    assert [line for line in lines if line and not line.startswith("#")] == []


@pytest.mark.parametrize("name", list(describe()))
def test_each_line_by_itself_is_the_setting_as_it_is_in_the_stack(name: str) -> None:
    setting = describe()[name]
    value = _lines()[setting.variable]

    loaded = load([], {setting.variable: value})

    shown = getattr(loaded.settings, name)
    expected = COMPOSE_DEFAULTS.get(name)
    assert shown == (getattr(load([], {}).settings, name) if expected is None else type(shown)(expected))


def test_all_lines_together_load() -> None:
    settings = {name: value for name, value in _lines().items() if name.startswith("MOCKENGINE_")}

    assert load([], settings).settings.handshake_address == "tcp://frontend:29550"


def test_writing_it_anew_keeps_what_people_wrote(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    copy = tmp_path / ".env.example"
    copy.write_text(text.replace("Number of data-parallel ranks", "Anything"), encoding="utf-8")

    assert main([str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == text


def test_a_file_of_ones_own_is_not_committed() -> None:
    assert "/.env" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
