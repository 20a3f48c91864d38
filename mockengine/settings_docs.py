# SPDX-License-Identifier: Apache-2.0
"""Writes the table of settings in docs/settings.md: `python -m mockengine.settings_docs docs/settings.md`.

Nothing that runs imports it.
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from mockengine.settings import Description, describe

_BEGIN: Final = "<!-- begin: written by `python -m mockengine.settings_docs docs/settings.md` -->"
_END: Final = "<!-- end -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table anew into each page named in `argv` (default: the arguments of the process)."""
    for page in map(Path, sys.argv[1:] if argv is None else argv):
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def with_table(page: str) -> str:
    """Return the text `page` with the present table between its markers; raises `ValueError` if it lacks them."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table (write a line {_BEGIN} and, below it, a line {_END})")
    return f"{before}{begin}\n{_tables()}\n{end}{after}"


def _tables() -> str:
    groups = groupby(describe().values(), key=lambda description: description.group)
    return "".join(f"\n## {title}\n\n{_table(list(settings))}\n" for title, settings in groups)


def _table(settings: Sequence[Description]) -> str:
    rows = ["| YAML key, flag, variable | default | allowed | meaning |", "|---|---|---|---|"]
    for setting in settings:
        names = "<br>".join(f"`{name}`" for name in (setting.name, setting.flag, setting.variable))
        rows.append(f"| {names} | {setting.default} | {setting.allowed} | {setting.sentence} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
