# SPDX-License-Identifier: Apache-2.0
"""How tool calls are written: the text forms of the frontends' tool parsers, which are data files in `forms`."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from string import Template
from typing import Any, Final

from mockengine.replies.asked import ReplyError
from mockengine.replies.wish import ToolCall

DEFAULT_FORM: Final = "hermes"
_FOLDER: Final = Path(__file__).parent / "forms"
_SUFFIX: Final = ".toml"
_PLACES: Final[Mapping[str, frozenset[str]]] = {
    "call": frozenset({"name", "json_name", "arguments", "parameters"}),
    "parameter": frozenset({"name", "json_name", "value", "json_value"}),
}


class FormError(Exception):
    """A form of tool calls that cannot be used; the text says why and what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallForm:
    """How tool calls are written.

    Attributes:
        name: the form's, or its file.
        call: a call, with `${name}`, `${json_name}` and either `${arguments}`, in JSON, or `${parameters}` in it.
        begin: what stands before the first call.
        between: two calls.
        end: after the last call.
        parameter: one of the parameters, with `${name}`, `${json_name}`, `${value}`, where a text is as it is and all
            else is JSON, or `${json_value}` in it.
        text_before: whether text may come before the calls.

    """

    name: str
    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    parameter: str = ""
    text_before: bool = True

    def said(self, text: str, calls: Sequence[ToolCall]) -> str:
        """Return a text with the calls after it.

        Raises:
            ReplyError: the form has no text before calls.

        """
        if not calls:
            return text
        if text and not self.text_before:
            raise ReplyError(f"the form {self.name} has no text before tool calls (leave out the text)")
        return text + self.begin + self.between.join(map(self._call, calls)) + self.end

    def _call(self, call: ToolCall) -> str:
        arguments = call.arguments if isinstance(call.arguments, str) else _json(call.arguments)
        return Template(self.call).substitute(
            name=call.name,
            json_name=_json(call.name),
            arguments=arguments,
            parameters=self._parameters(call.arguments) if self.parameter else "",
        )

    def _parameters(self, arguments: Mapping[str, object] | str) -> str:
        """Return the arguments one by one; a text that is no object in JSON is said as it is."""
        if isinstance(arguments, str):
            try:
                found = json.loads(arguments)
            except (ValueError, RecursionError):
                return arguments
            if not isinstance(found, dict):
                return arguments
            arguments = found
        template = Template(self.parameter)
        return "".join(
            template.substitute(
                name=name,
                json_name=_json(name),
                value=value if isinstance(value, str) else _json(value),
                json_value=_json(value),
            )
            for name, value in arguments.items()
        )


def form_names() -> list[str]:
    """Return the names of the forms that come along."""
    return sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}"))


def load_form(named: str = DEFAULT_FORM) -> ToolCallForm:
    """Read a form that comes along, by its name, or another one from its file.

    Raises:
        FormError: there is none, or it cannot be used.

    """
    is_ours = named in form_names()
    path = _FOLDER / f"{named}{_SUFFIX}" if is_ours else Path(named)
    if not is_ours and path.suffix != _SUFFIX:
        raise FormError(f"{named}: no such form: name one of {', '.join(form_names())}, or a file of your own, *.toml")
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise FormError(f"{path}: {reason} (name one of {', '.join(form_names())}, or a file)") from error
    except tomllib.TOMLDecodeError as error:
        raise FormError(f"{path}: not TOML: {error}") from error
    problems = _problems(given)
    if problems:
        raise FormError(f"{path}: {'; '.join(problems)}")
    return ToolCallForm(name=named, **given)


def _problems(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a form as it is in its file."""
    known = {each.name for each in fields(ToolCallForm)} - {"name"}
    problems = [f"{key} is unknown (there are {', '.join(sorted(known))})" for key in sorted(given.keys() - known)]
    for key in sorted(known & given.keys()):
        kind = bool if key == "text_before" else str
        if not isinstance(given[key], kind):
            problems.append(f"{key} is {'neither true nor false' if kind is bool else 'no text'}")
    if problems:
        return problems
    for key, places in _PLACES.items():
        template = Template(given.get(key, ""))
        if not template.is_valid():
            problems.append(f"{key} has a $ that begins no place to fill in (write $$ for a $)")
        unknown = set(template.get_identifiers()) - places if template.is_valid() else set()
        if unknown:
            problems.append(f"{key} has ${{{min(unknown)}}} (there are {', '.join(sorted(places))})")
    return problems or _missing(given)


def _missing(given: Mapping[str, Any]) -> list[str]:
    named = set(Template(given.get("call", "")).get_identifiers())
    if not named & {"name", "json_name"} or not named & {"arguments", "parameters"}:
        return ["call needs ${name} or ${json_name}, and ${arguments} or ${parameters}"]
    if "parameters" in named and not given.get("parameter"):
        return ["call has ${parameters}, and no parameter says how one is written"]
    return []


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
