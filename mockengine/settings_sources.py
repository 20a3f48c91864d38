# SPDX-License-Identifier: Apache-2.0
"""Where the values of the settings come from: flags, then variables, then a YAML file, then the defaults.

Every source gives text, and the same text means the same in each of them. YAML's own types therefore play no part:
`0.30` stays a version and does not become the number 0.3, `010` is ten and not eight. Problems are collected, not
raised one by one: each is a line that names the place, the value, what is allowed and what to do. This module must not
know what any single setting means; that is in `settings`.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import TypeAdapter, ValidationError

from mockengine.settings import LIVE, PREFIX, Settings, as_text, describe
from mockengine.settings_rules import combination_problems
from mockengine.settings_types import ReasonError

if TYPE_CHECKING:
    import yaml

CONFIG_FLAG: Final = "--config"
CONFIG_VARIABLE: Final = PREFIX + "CONFIG"

_CONFIG: Final = "config"
_SHOWN_CHARACTERS: Final = 60
# Kubernetes gives a container such variables for each service of its namespace, and a service may be called
# mockengine: MOCKENGINE_SERVICE_HOST=10.0.0.1, MOCKENGINE_PORT_29550_TCP=tcp://10.0.0.1:29550 and so on.
_SERVICE_LINK: Final = re.compile(
    PREFIX + r"(?:[A-Z0-9_]+_)?"
    r"(?:SERVICE_HOST=.+|SERVICE_PORT(?:_[A-Z0-9_]+)?=\d+|PORT(?:_\d+_(?:TCP|UDP|SCTP))?=(?:tcp|udp|sctp)://.+"
    r"|PORT_\d+_(?:TCP|UDP|SCTP)_(?:PROTO=(?:tcp|udp|sctp)|PORT=\d+|ADDR=.+))"
)


class SettingsError(Exception):
    """The settings cannot work; `problems` holds one line for each reason, and `str()` all of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"the settings have {count}:", *problems]))


@dataclass(frozen=True, slots=True)
class Loaded:
    """Valid settings, and for each name where its value came from: `default`, `MOCKENGINE_X`, `--x` or `FILE:line`."""

    settings: Settings
    origins: Mapping[str, str]


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded:
    """Read the settings from flags, variables and the file that one of these names.

    Raises `SettingsError` with all problems at once.
    """
    reader = _Reader()
    given = reader.read(argv, environ)
    values = reader.validate(given)
    origins = {name: given[name][-1].origin if name in given else "default" for name in Settings.model_fields}
    for names, text in combination_problems(values):
        shown = ", ".join(f"{name} {_shown(as_text(values[name]))} ({origins[name]})" for name in names)
        reader.problems.append(f"{shown}: {text}")
    if reader.problems:
        raise SettingsError(reader.problems)
    return Loaded(Settings(**values), origins)


def changed(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """Return settings of which some are others than before, of those that may change while the engine runs.

    A value is what it is in every source, or what JSON has for it; None is the default. Raises `SettingsError` with all
    problems at once.
    """
    reader = _Reader()
    values = dict(settings)
    given: dict[str, list[_Given]] = {}
    for name, value in changes.items():
        if name not in LIVE:
            reader.problems.append(_not_live(name))
        elif value is None:
            values[name] = Settings.model_fields[name].default
        elif isinstance(value, str | int | float):
            given[name] = [_Given(as_text(value).strip(), "", name)]
        else:
            reader.problems.append(f"{_shown(name)}: neither a text nor a number nor true or false")
    read = reader.validate(given)
    values |= {name: read[name] for name in given if name in read}
    for names, text in combination_problems(values):
        shown = ", ".join(f"{name} {_shown(as_text(values[name]))}" for name in names)
        reader.problems.append(f"{shown}: {text}")
    if reader.problems:
        raise SettingsError(reader.problems)
    return Settings(**values)


def _not_live(name: str) -> str:
    if name in Settings.model_fields:
        return f"{name}: it does not change while the engine runs (start the engine with it)"
    hint = _hint(name, LIVE, f"those that may change are {', '.join(sorted(LIVE))}")
    return f"{_shown(name)}: there is no such setting ({hint})"


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was written, where that was, and the words that begin a line about it."""

    text: str
    origin: str
    place: str


class _Reader:
    """Reads all sources and collects what is wrong with them in `problems`."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._descriptions = describe()

    def read(self, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, list[_Given]]:
        """Return all that is given, by name, the strongest last."""
        flags, variables = self._read_flags(argv), self._read_variables(environ)
        configs = [given for name, given in [*variables, *flags] if name == _CONFIG]
        file = self._read_file(configs[-1]) if configs else []
        by_name = defaultdict(list)
        for name, given in [*file, *variables, *flags]:
            by_name[name].append(given)
        return by_name

    def validate(self, given: Mapping[str, Sequence[_Given]]) -> dict[str, Any]:
        """Return the value in effect of every setting, by name; what another source overrides must be valid too."""
        values: dict[str, Any] = {}
        for name, field in Settings.model_fields.items():
            values[name] = field.default
            for one in given.get(name, ()):
                try:
                    values[name] = _adapter(name).validate_python(one.text)
                except ValueError as error:
                    # Mostly pydantic's ValidationError; UnicodeEncodeError for a variable that is not UTF-8.
                    values.pop(name, None)
                    description = self._descriptions[name]
                    text = None if description.is_secret else one.text
                    self._refuse(one.place, text, description.allowed, _reason(error))
        return values

    def _refuse(self, place: str, text: str | None, allowed: str, reason: str = "") -> None:
        """Note that a value is not allowed, or, without one, a secret."""
        shown = "what is given" if text is None else _shown(text)
        self.problems.append(f"{place}: {shown} is not allowed{reason} (use {allowed})")

    def _read_flags(self, argv: Sequence[str]) -> list[tuple[str, _Given]]:
        """Read `--name value`, `--name=value` and, for switches, `--name` and `--no-name`; the last one wins.

        argparse is no help here: it exits at the first problem.
        """
        names = {description.flag: name for name, description in self._descriptions.items()} | {CONFIG_FLAG: _CONFIG}
        switches = {description.flag for description in self._descriptions.values() if description.is_switch}
        negated = {switch.replace("--", "--no-", 1): switch for switch in switches}
        given = []
        words = deque(argv)
        while words:
            flag, equals, text = words.popleft().partition("=")
            has_value = bool(equals) or (flag.startswith("-") and _is_value_next(words))
            if has_value and not equals:
                text = words.popleft()
            if flag in negated and has_value:
                self._refuse(flag, text, f"{flag} alone, or {negated[flag]} with true or false")
            elif flag in negated:
                given.append((names[negated[flag]], _Given("false", flag, flag)))
            elif flag in names:
                text = text.strip() if has_value or flag not in switches else "true"
                if text:
                    given.append((names[flag], _Given(text, flag, flag)))
                else:
                    self.problems.append(f"{flag}: the value is missing (use {self._allowed(names[flag])})")
            else:
                self.problems.append(_unknown_word(flag, [*names, *negated]))
        return given

    def _allowed(self, name: str) -> str:
        return "the path of a YAML file" if name == _CONFIG else self._descriptions[name].allowed

    def _read_variables(self, environ: Mapping[str, str]) -> list[tuple[str, _Given]]:
        """Read `MOCKENGINE_*`; an empty variable counts as unset, because a compose file cannot leave one out."""
        names = {description.variable: name for name, description in self._descriptions.items()}
        names[CONFIG_VARIABLE] = _CONFIG
        given = []
        for variable, text in environ.items():
            is_ours = variable.upper().startswith(PREFIX) and not _SERVICE_LINK.fullmatch(f"{variable}={text}")
            if not is_ours or not text.strip():
                continue
            if variable in names:
                given.append((names[variable], _Given(text.strip(), variable, variable)))
            else:
                self.problems.append(
                    f"{_shown(variable)}: there is no such variable, its value {_shown(text)} would be ignored "
                    f"({_hint(variable, names, 'correct or unset it')})"
                )
        return given

    def _read_file(self, config: _Given) -> list[tuple[str, _Given]]:
        import yaml  # noqa: PLC0415 - most processes have no file and need not pay for this import

        file = _quoted(config.text)
        text = ""
        try:
            text = Path(config.text).read_bytes().decode("utf-8-sig")
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except OSError as error:
            self.problems.append(f"{config.place}: {file}: {error.strerror} (use the path of a readable YAML file)")
        except UnicodeDecodeError as error:
            self.problems.append(f"{config.place}: {file}: byte {error.start} is not UTF-8 (use a text file in YAML)")
        except (yaml.YAMLError, RecursionError) as error:
            self.problems.append(_not_yaml(file, text, error))
        else:
            if isinstance(root, yaml.MappingNode):
                return self._read_mapping(file, root)
            if root is not None:
                line = root.start_mark.line + 1
                self.problems.append(f"{file}:{line}: not a mapping (use one line `name: value` for each setting)")
        return []

    def _read_mapping(self, file: str, root: "yaml.MappingNode") -> list[tuple[str, _Given]]:
        """Read the keys of the file's one mapping; null and empty values count as unset."""
        given = []
        lines: dict[str, int] = {}
        for key, value in root.value:
            name = key.value if isinstance(key.value, str) else f"a {key.id}"
            line = key.start_mark.line + 1
            place = f"{file}:{line}: {_shown(name)}"
            if name not in self._descriptions:
                hint = _hint(name, self._descriptions, "correct or remove it")
                self.problems.append(f"{place}: there is no such setting ({hint})")
            elif name in lines:
                self.problems.append(f"{place}: set on line {lines[name]} already (remove one of the two)")
            else:
                lines[name] = line
                if not isinstance(value.value, str):
                    self.problems.append(f"{place}: a {value.id} is not allowed (use {self._allowed(name)})")
                elif value.value.strip() and not value.tag.endswith(":null"):
                    given.append((name, _Given(value.value.strip(), f"{file}:{line}", place)))
        return given


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """Return what reads the value of a setting; to make it takes some milliseconds, which a running engine notices."""
    field = Settings.model_fields[name]
    annotation: Any = Annotated[field.annotation, field]
    return TypeAdapter(annotation)


def _is_value_next(words: Sequence[str]) -> bool:
    """Whether the word that follows a flag is its value and no flag too; -1 is a value."""
    return bool(words) and not words[0].startswith("--")


def _reason(error: ValueError) -> str:
    """Return why a value is not allowed, if its setting says so."""
    cause = error.errors()[0].get("ctx", {}).get("error") if isinstance(error, ValidationError) else None
    return f": {cause}" if isinstance(cause, ReasonError) else ""


def _unknown_word(word: str, flags: Iterable[str]) -> str:
    if word.startswith("-"):
        return f"{_shown(word)}: there is no such flag ({_hint(word, flags, 'correct or remove it')})"
    return f"{_shown(word)}: not expected here (a command comes first, a value right after its flag)"


def _hint(wrong: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question with the nearest known name, or `otherwise`; prefix, case, `-` and `_` make no difference."""
    plain = {_plain(name): name for name in known}
    nearest = get_close_matches(_plain(wrong), plain, n=1, cutoff=0.7)
    return f"did you mean {plain[nearest[0]]}?" if nearest else f"{otherwise}; mockengine --help names them all"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").strip("_").removeprefix(PREFIX.lower())


def _not_yaml(file: str, text: str, error: Exception) -> str:
    """Say in one line where and why the `text` of `file` is no YAML."""
    mark = getattr(error, "problem_mark", None)
    position = mark.index if mark else getattr(error, "position", 0)
    line = text.count("\n", 0, position) + 1
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "nested too deeply"
    return f"{file}:{line}: not YAML: {reason} (use one line `name: value` for each setting)"


def _shown(text: str) -> str:
    """Return the beginning of `text`, for a message."""
    return _quoted(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…")


def _quoted(text: str) -> str:
    """Return `text` in quotes, unless it is one plain word."""
    return text if text.isprintable() and text and " " not in text else repr(text)
