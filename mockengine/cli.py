# SPDX-License-Identifier: Apache-2.0
"""The front door: which command is meant, its exit code, and the help.

It knows the commands by name and leaves the work to them. What only some commands need is imported when one of them
runs, so that health and smoke answer without pydantic, and help and settings without numpy and ZMQ.
"""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING, Final, TextIO

from mockengine import __version__

if TYPE_CHECKING:
    from mockengine.ctl import AdminAddress
    from mockengine.settings import Description
    from mockengine.settings_sources import Loaded

_FAILED: Final = 1
_WRONG_USE: Final = 2
_WIDTH: Final = 110
_USAGE: Final = """\
usage: mockengine [serve] [FLAGS]
       mockengine settings [FLAGS] [--json]
       mockengine health [FLAGS]
       mockengine ctl [FLAGS] ORDER
       mockengine scenario [FLAGS] FILE [--seed N] [--speed N]
       mockengine smoke --url URL [FLAGS]
       mockengine fit RESULTS... [FLAGS]

Plays vLLM's engine core, so that a real vLLM frontend serves without a GPU.

Commands:
  serve     join the frontend and serve it; this is the default
  settings  print the settings in effect and where each comes from
  health    ask a running engine's admin port whether it is alive; exit code 0: it is, 1: it is not
  ctl       ask a running engine about itself and change it, over its admin port; has a --help of its own
  scenario  run a timeline of settings and faults against a running engine, over its admin port
  smoke     send one chat completion to a frontend and say what came back; has a --help of its own
  fit       make a profile of a real deployment out of results of `vllm bench serve`; has a --help of its own

Settings: a flag wins over a variable, a variable over the YAML file, the file over the default.
The key in the file is the name of the flag, with _ for -.

  {config_flag} FILE
      YAML file with one line `name: value` for each setting.
      {config_variable}, no default
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the arguments of the process) asks for and return the exit code.

    0: done; 1: the command failed; 2: it was used wrongly, all problems are on stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and not words[0].startswith("-") else "serve"
    if command not in _COMMANDS:
        _complain(f"mockengine: there is no command {command!r} (use {', '.join(_COMMANDS)}, or --help)\n")
        return _WRONG_USE
    return _COMMANDS[command](words)


def _serve(words: list[str]) -> int:
    answered = _answer_about_us(words)
    if answered is not None:
        return answered
    loaded = _load(words)
    if loaded is None:
        return _WRONG_USE
    from mockengine import service  # noqa: PLC0415 - brings numpy and ZMQ, see above

    try:
        return service.run(loaded.settings)
    except service.StartError as error:
        _complain(f"mockengine: {error}\n")
        return _FAILED


def _settings(words: list[str]) -> int:
    answered = _answer_about_us(words)
    if answered is not None:
        return answered
    loaded = _load([word for word in words if word != "--json"])
    if loaded is None:
        return _WRONG_USE
    from mockengine.settings import as_text  # noqa: PLC0415 - see above

    rows = list(_effective(loaded))
    if "--json" in words:
        return _say(json.dumps({name: {"value": value, "from": origin} for name, value, origin in rows}, indent=2))
    lines = [(name, as_text(value), origin) for name, value, origin in rows]
    return _say(_table([("SETTING", "VALUE", "FROM"), *lines]))


def _health(words: list[str]) -> int:
    answered = _answer_about_us(words)
    if answered is not None:
        return answered
    from mockengine import health  # noqa: PLC0415 - see above

    address = health.address_from(os.environ) if not words else None
    if address is None:
        loaded = _load(words)
        if loaded is None:
            return _WRONG_USE
        address = loaded.settings.admin_host, loaded.settings.admin_port
    if not address[1]:
        _complain(
            "mockengine: admin_port is 0, so there is nobody to ask "
            "(give the engine's: MOCKENGINE_ADMIN_PORT or --admin-port)\n"
        )
        return _WRONG_USE
    is_alive, text = health.ask(*address)
    if is_alive:
        return _say(text)
    _complain(f"mockengine: {text}\n")
    return _FAILED


def _ctl(words: list[str]) -> int:
    from mockengine import ctl  # noqa: PLC0415 - see above

    if "--help" in words or "-h" in words:
        return _say(ctl.USAGE)
    flags, order = _split(words)
    address = _admin_address(flags)
    if address is None:
        return _WRONG_USE
    try:
        answer = ctl.obey(address, order)
    except ctl.UsageError as error:
        _complain(f"mockengine: {error}\n")
        return _WRONG_USE
    except ctl.OrderError as error:
        _complain(f"mockengine: {error}\n")
        return _FAILED
    return _say(json.dumps(answer, indent=2))


def _scenario(words: list[str]) -> int:
    answered = _answer_about_us(words)
    if answered is not None:
        return answered
    from mockengine import scenario  # noqa: PLC0415 - see above

    flags, rest = _split(words)
    address = _admin_address(flags)
    return _WRONG_USE if address is None else scenario.main(rest, address)


def _admin_address(flags: list[str]) -> "AdminAddress | None":
    """Return where a running engine is, or None after telling that nobody has said so."""
    from mockengine.ctl import AdminAddress  # noqa: PLC0415 - see above

    loaded = _load(flags)
    if loaded is None:
        return None
    settings = loaded.settings
    if not settings.admin_port:
        _complain(
            "mockengine: admin_port is 0, so there is nobody to ask "
            "(give the engine's: MOCKENGINE_ADMIN_PORT or --admin-port)\n"
        )
        return None
    token = settings.admin_token.get_secret_value() if settings.admin_token is not None else None
    return AdminAddress(settings.admin_host, settings.admin_port, token)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags before an order, each with its value, and the order."""
    place = 0
    while place < len(words) and words[place].startswith("--"):
        place += 1 if "=" in words[place] else 2
    return list(words[:place]), list(words[place:])


def _smoke(words: list[str]) -> int:
    from mockengine import smoke  # noqa: PLC0415 - an HTTP client that serving does not need

    return _let_speak(smoke.main, words)


def _fit(words: list[str]) -> int:
    from mockengine.fit import command  # noqa: PLC0415 - nothing that serving needs

    return _let_speak(command.main, words)


def _let_speak(run: Callable[[Sequence[str]], int], words: list[str]) -> int:
    """Run a command that writes when it is done: only here is known what to do when there is no room for that."""
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        exit_code = run(words)
    _complain(stderr.getvalue())
    said = _say(stdout.getvalue()) if stdout.getvalue() else 0
    return exit_code or said


_COMMANDS: Final[dict[str, Callable[[list[str]], int]]] = {
    "serve": _serve,
    "settings": _settings,
    "health": _health,
    "ctl": _ctl,
    "scenario": _scenario,
    "smoke": _smoke,
    "fit": _fit,
}


def _load(words: list[str]) -> "Loaded | None":
    """Return the settings, or None after telling what is wrong with them."""
    from mockengine.settings_sources import SettingsError, load  # noqa: PLC0415 - see above

    try:
        return load(words, os.environ)
    except SettingsError as error:
        _complain(f"mockengine: {error}\n")
        return None


def _answer_about_us(words: list[str]) -> int | None:
    """Answer --help and --version, which win over whatever else is wrong; return the exit code, None if not asked."""
    if "--help" in words or "-h" in words:
        return _say(_help())
    if "--version" in words:
        return _say(f"mockengine {__version__}")
    return None


def _help() -> str:
    from mockengine.settings import describe  # noqa: PLC0415 - see above
    from mockengine.settings_sources import CONFIG_FLAG, CONFIG_VARIABLE  # noqa: PLC0415 - see above

    usage = _USAGE.format(config_flag=CONFIG_FLAG, config_variable=CONFIG_VARIABLE)
    groups = groupby(describe().values(), key=lambda description: description.group)
    return "\n".join([usage, *(f"{title}:\n\n{''.join(map(_help_for, group))}" for title, group in groups)])


def _help_for(setting: "Description") -> str:
    flag = f"{setting.flag}, {setting.flag.replace('--', '--no-', 1)}" if setting.is_switch else f"{setting.flag} VALUE"
    facts = f"{setting.variable}, default {setting.default}, allowed: {setting.allowed}"
    return f"  {flag}\n{_indented(setting.sentence)}\n{_indented(facts)}\n"


def _indented(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )


def _effective(loaded: "Loaded") -> Iterator[tuple[str, object, str]]:
    """Yield name, value in effect and origin of every setting."""
    for name, value in loaded.settings:
        yield name, getattr(loaded.settings, f"effective_{name}", value), loaded.origins[name]


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


def _say(text: str) -> int:
    """Print `text` and return the exit code: that of a failure if stdout does not take it."""
    stdout = sys.stdout
    if stdout is None:
        _complain("mockengine: stdout is closed, so there is nowhere to print to\n")
        return _FAILED
    try:
        # A name in some other script must not keep the rest from being read.
        stdout.write(text.encode(stdout.encoding, "backslashreplace").decode(stdout.encoding).rstrip("\n") + "\n")
        stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough.
        _silence(stdout)
    except OSError as error:
        _silence(stdout)
        _complain(f"mockengine: stdout: {error.strerror}\n")
        return _FAILED
    return 0


def _complain(text: str) -> None:
    """Print `text` on stderr; if that cannot be, the exit code must do."""
    stderr = sys.stderr
    if stderr is not None:
        try:
            stderr.write(text)
        except OSError:
            _silence(stderr)


def _silence(stream: TextIO) -> None:
    """Point the stream at nothing: Python flushes it at exit and would fail again, with an exit code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
