# SPDX-License-Identifier: Apache-2.0
"""The front door: which command is meant, its exit code, and the help.

It knows the commands by name and leaves the work to them. What only one command needs is imported when that one runs,
so that help, settings and smoke answer without numpy and ZMQ.
"""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final

from mockengine import __version__
from mockengine.settings import Description, as_text, describe
from mockengine.settings_sources import CONFIG_FLAG, CONFIG_VARIABLE, Loaded, SettingsError, load

_WRONG_USE: Final = 2
# What a shell reports for a program that Ctrl-C ended.
_INTERRUPTED: Final = 130
_WIDTH: Final = 110
_USAGE: Final = f"""\
usage: mockengine [serve] [FLAGS]
       mockengine settings [FLAGS] [--json]
       mockengine smoke --url URL [FLAGS]

Plays vLLM's engine core, so that a real vLLM frontend serves without a GPU.

Commands:
  serve     join the frontend and serve it; this is the default
  settings  print the settings in effect and where each comes from
  smoke     send one chat completion to a frontend and say what came back; has a --help of its own

Settings: a flag wins over a variable, a variable over the YAML file, the file over the default.
The key in the file is the name of the flag, with _ for -.

  {CONFIG_FLAG} FILE
      YAML file with one line `name: value` for each setting.
      {CONFIG_VARIABLE}, no default
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the arguments of the process) asks for and return the exit code.

    0: done; 1: the command failed; 2: it was used wrongly, all problems are on stderr; 130: Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and not words[0].startswith("-") else "serve"
    if command not in _COMMANDS:
        sys.stderr.write(f"mockengine: there is no command {command!r} (use {', '.join(_COMMANDS)}, or --help)\n")
        return _WRONG_USE
    try:
        return _COMMANDS[command](words)
    except SettingsError as error:
        sys.stderr.write(f"mockengine: {error}\n")
        return _WRONG_USE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _serve(words: list[str]) -> int:
    if _asks_about_us(words):
        return 0
    settings = load(words, os.environ).settings
    from mockengine import service  # noqa: PLC0415 - brings numpy and ZMQ, see above

    return service.run(settings)


def _settings(words: list[str]) -> int:
    if _asks_about_us(words):
        return 0
    as_json = "--json" in words
    rows = list(_effective(load([word for word in words if word != "--json"], os.environ)))
    if as_json:
        _say(json.dumps({name: {"value": value, "from": origin} for name, value, origin in rows}, indent=2))
    else:
        _say(_table([("SETTING", "VALUE", "FROM"), *((name, as_text(value), origin) for name, value, origin in rows)]))
    return 0


def _smoke(words: list[str]) -> int:
    from mockengine import smoke  # noqa: PLC0415 - an HTTP client that serving does not need

    return smoke.main(words)


_COMMANDS: Final[dict[str, Callable[[list[str]], int]]] = {"serve": _serve, "settings": _settings, "smoke": _smoke}


def _asks_about_us(words: list[str]) -> bool:
    """Answer --help and --version; they win over whatever else is wrong."""
    if "--help" in words or "-h" in words:
        _say(_help())
    elif "--version" in words:
        _say(f"mockengine {__version__}")
    else:
        return False
    return True


def _help() -> str:
    groups = groupby(describe().values(), key=lambda description: description.group)
    return "\n".join([_USAGE, *(f"{title}:\n\n{''.join(map(_help_for, group))}" for title, group in groups)])


def _help_for(setting: Description) -> str:
    flag = f"{setting.flag}, {setting.flag.replace('--', '--no-', 1)}" if setting.is_switch else f"{setting.flag} VALUE"
    facts = f"{setting.variable}, default {setting.default}, allowed: {setting.allowed}"
    return f"  {flag}\n{_indented(setting.sentence)}\n{_indented(facts)}\n"


def _indented(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )


def _effective(loaded: Loaded) -> Iterator[tuple[str, object, str]]:
    """Yield name, value in effect and origin of every setting."""
    for name, value in loaded.settings:
        yield name, getattr(loaded.settings, f"effective_{name}", value), loaded.origins[name]


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


def _say(text: str) -> None:
    try:
        sys.stdout.write(text.rstrip("\n") + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
