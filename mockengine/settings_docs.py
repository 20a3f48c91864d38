# SPDX-License-Identifier: Apache-2.0
"""Writes what follows from the settings into files that people write: `python -m mockengine.settings_docs FILE...`.

A page (`.md`) gets the table, a compose file (`.yml`) the variables that it passes through, any other file, which is
`.env.example`, a line for every variable; each between two marks. Nothing that runs imports it.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Final

from mockengine.settings import Description, describe
from mockengine.testing.fetch import DEFAULT_VERSION

COMPOSE_DEFAULTS: Final = {
    "handshake_address": "tcp://frontend:29550",
    "vllm_version": DEFAULT_VERSION,
    "state_file": "/var/lib/mockengine/state.json",
    "admin_host": "0.0.0.0",  # noqa: S104 - said, not done
    "admin_port": "29555",
}
"""Settings that docker-compose.yml decides unless a variable does, and how."""

_COMMENT_WIDTH: Final = 118


@dataclass(frozen=True, slots=True)
class _Part:
    """The written part of one kind of file: the lines around it, and what makes it."""

    name: str
    begin: str
    end: str
    text: Callable[[], str]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the part anew in each file named in `argv` (default: the arguments of the process)."""
    for path in map(Path, sys.argv[1:] if argv is None else argv):
        path.write_text(written_anew(path), encoding="utf-8")
    return 0


def written_anew(path: Path) -> str:
    """Return the text that the file should have; raises `ValueError` if it lacks the marks of its part."""
    text = path.read_text(encoding="utf-8")
    return _with_part(text, {".md": _TABLE, ".yml": _PASSED_THROUGH}.get(path.suffix, _EXAMPLE))


def _with_part(text: str, part: _Part) -> str:
    before, begin, rest = text.partition(part.begin)
    _, end, after = rest.partition(part.end)
    if not begin or not end:
        raise ValueError(
            f"the page has no place for {part.name} (write a line {part.begin.strip()} and, below it, a line "
            f"{part.end.strip()})"
        )
    return f"{before}{begin}\n{part.text()}{end}{after}"


def _groups() -> Iterable[tuple[str, Iterable[Description]]]:
    return groupby(describe().values(), key=lambda description: description.group)


def _tables() -> str:
    return "".join(f"\n## {title}\n\n{_table(list(settings))}\n" for title, settings in _groups()) + "\n"


def _table(settings: Sequence[Description]) -> str:
    rows = ["| YAML key, flag, variable | default | allowed | meaning | live |", "|---|---|---|---|---|"]
    for setting in settings:
        names = "<br>".join(f"`{name}`" for name in (setting.name, setting.flag, setting.variable))
        live = "yes" if setting.is_live else ""
        rows.append(f"| {names} | {setting.default} | {setting.allowed} | {setting.sentence} | {live} |")
    return "\n".join(rows)


def _example() -> str:
    return "".join(
        f"\n# -- {title} --\n\n" + "\n".join(_example_line(setting) for setting in settings)
        for title, settings in _groups()
    )


def _example_line(setting: Description) -> str:
    value = COMPOSE_DEFAULTS.get(setting.name, setting.default)
    default = value if value == setting.default else f"{value}, without compose {setting.default}"
    shown = "" if value == "unset" else value
    comment = f"{setting.sentence}\nAllowed: {setting.allowed}. Default: {default}."
    lines = [line for sentence in comment.splitlines() for line in wrap(sentence, _COMMENT_WIDTH)]
    return "".join(f"# {line}\n" for line in lines) + f"#{setting.variable}={shown}\n"


def _passed_through() -> str:
    settings = [setting for name, setting in describe().items() if name not in COMPOSE_DEFAULTS]
    # Not the name alone: a stack that includes the file would not see what a file .env beside that says.
    return "".join(f"      {setting.variable}: ${{{setting.variable}:-}}\n" for setting in settings)


_TABLE: Final = _Part(
    "the table",
    "<!-- begin: written by `python -m mockengine.settings_docs docs/settings.md` -->",
    "<!-- end -->",
    _tables,
)
_PASSED_THROUGH: Final = _Part("the variables", "      # begin: written by `make docs`", "      # end", _passed_through)
_EXAMPLE: Final = _Part("the variables", "# begin: written by `make docs`", "# end", _example)


if __name__ == "__main__":
    sys.exit(main())
