# SPDX-License-Identifier: Apache-2.0
"""Files that say how something is written for the frontends' parsers: those that come along, and people's own."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Final

_SUFFIX: Final = ".toml"
_ALSO_FOR: Final = "also_for"


class FormError(Exception):
    """A form that cannot be used; the text says why, and what there is."""


@dataclass(frozen=True, slots=True)
class FormFile:
    """A form as it is in its file.

    Attributes:
        name: by which it was asked for.
        path: of the file.
        given: its keys, but for other names of the form.

    """

    name: str
    path: Path
    given: Mapping[str, Any]


@cache
def form_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the forms that come along: those of their files, and of parsers that read the same."""
    return tuple(sorted(_paths(folder)))


def read_form(named: str, folder: Path) -> FormFile:
    """Read a form that comes along, by its name, or another one from its file.

    Raises:
        FormError: there is none, or it cannot be read.

    """
    ours = _paths(folder).get(named)
    path = Path(named) if ours is None else ours
    names = ", ".join(form_names(folder))
    if ours is None and path.suffix != _SUFFIX:
        raise FormError(f"{named}: no such form: name one of {names}, or a file of your own, *{_SUFFIX}")
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise FormError(f"{path}: {reason} (name one of {names}, or a file)") from error
    except tomllib.TOMLDecodeError as error:
        raise FormError(f"{path}: not TOML: {error}") from error
    if ours is not None:
        given.pop(_ALSO_FOR, None)
    return FormFile(named, path, given)


def check_form(form: FormFile, kinds: Mapping[str, type], places: Mapping[str, frozenset[str]]) -> None:
    """Refuse a form with keys, values or places to fill in that there are not.

    Args:
        form: the form.
        kinds: type of the value of each key, a text or a bool.
        places: what may be filled in, by key.

    Raises:
        FormError: names all that is wrong.

    """
    problems = [*_wrong_keys(form.given, kinds)] or [*_wrong_places(form.given, places)]
    if problems:
        raise FormError(f"{form.path}: {'; '.join(problems)}")


def _wrong_keys(given: Mapping[str, Any], kinds: Mapping[str, type]) -> Iterator[str]:
    for key in sorted(given.keys() - kinds.keys()):
        yield f"{key} is unknown (there are {', '.join(sorted(kinds))})"
    for key in sorted(given.keys() & kinds.keys()):
        if type(given[key]) is not kinds[key]:
            yield f"{key} is {'neither true nor false' if kinds[key] is bool else 'no text'}"


def _wrong_places(given: Mapping[str, Any], places: Mapping[str, frozenset[str]]) -> Iterator[str]:
    for key, known in places.items():
        template = Template(given.get(key, ""))
        if not template.is_valid():
            yield f"{key} has a $ that begins no place to fill in (write $$ for a $)"
        elif unknown := set(template.get_identifiers()) - known:
            yield f"{key} has ${{{min(unknown)}}} (there are {', '.join(sorted(known))})"


@cache
def _paths(folder: Path) -> Mapping[str, Path]:
    paths = {path.stem: path for path in folder.glob(f"*{_SUFFIX}")}
    others = {
        str(name): path
        for path in paths.values()
        for name in tomllib.loads(path.read_text(encoding="utf-8")).get(_ALSO_FOR, ())
    }
    return others | paths
