# SPDX-License-Identifier: Apache-2.0
"""How tool calls are written: the text forms of the frontends' tool parsers, which are data files in `forms`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from string import Template
from typing import Final

from mockengine.replies.asked import ReplyError
from mockengine.replies.form_files import FormError, FormFile, check_form, form_names, read_form
from mockengine.replies.wish import ToolCall

DEFAULT_FORM: Final = "hermes"
_FOLDER: Final = Path(__file__).parent / "forms"
_PLACES: Final[Mapping[str, frozenset[str]]] = {
    "call": frozenset({"name", "json_name", "index", "arguments", "parameters"}),
    "parameter": frozenset({"name", "json_name", "value", "json_value", "python_value"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallForm:
    """How tool calls are written.

    Attributes:
        name: the form's, or its file.
        call: a call, with `${name}` or `${json_name}`, perhaps `${index}`, which counts calls from 0, and either
            `${arguments}`, in JSON, or `${parameters}` in it.
        begin: what stands before the first call.
        between: two calls.
        end: after the last call.
        parameter: one of the parameters, with `${name}` or `${json_name}`, and `${value}`, where a text is as it is and
            all else is JSON, `${json_value}` or `${python_value}` in it.
        between_parameters: what stands between two of them.
        text_before: whether text may come before the calls.

    """

    name: str
    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    parameter: str = ""
    between_parameters: str = ""
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
        said = self.between.join(self._call(call, index) for index, call in enumerate(calls))
        return text + self.begin + said + self.end

    def _call(self, call: ToolCall, index: int) -> str:
        arguments = call.arguments if isinstance(call.arguments, str) else _json(call.arguments)
        return Template(self.call).substitute(
            name=call.name,
            json_name=_json(call.name),
            index=index,
            arguments=arguments,
            parameters=self._parameters(call.arguments) if self.parameter else "",
        )

    def _parameters(self, arguments: Mapping[str, object] | str) -> str:
        """Return the arguments one by one; a text that is no object in JSON is said as it is."""
        try:
            found = json.loads(arguments) if isinstance(arguments, str) else arguments
            if isinstance(found, Mapping):
                return self.between_parameters.join(self._parameter(name, value) for name, value in found.items())
        except (ValueError, RecursionError):
            # Nested deeper than can be read, or written.
            pass
        return arguments if isinstance(arguments, str) else ""

    def _parameter(self, name: str, value: object) -> str:
        in_json = _json(value)
        return Template(self.parameter).substitute(
            name=name,
            json_name=_json(name),
            value=value if isinstance(value, str) else in_json,
            json_value=in_json,
            python_value=repr(value),
        )


def tool_call_forms() -> Sequence[str]:
    """Return the names of the forms that come along."""
    return form_names(_FOLDER)


def load_form(named: str = DEFAULT_FORM) -> ToolCallForm:
    """Read a form that comes along, by its name, or another one from its file.

    Raises:
        FormError: there is none, or it cannot be used.

    """
    form = read_form(named, _FOLDER)
    kinds: dict[str, type] = {field.name: str for field in fields(ToolCallForm)} | {"text_before": bool}
    del kinds["name"]
    check_form(form, kinds, _PLACES)
    _check_complete(form)
    return ToolCallForm(name=named, **form.given)


def _check_complete(form: FormFile) -> None:
    """Refuse a form by which no call could be written; raises `FormError`."""
    named = set(Template(form.given.get("call", "")).get_identifiers())
    if not named & {"name", "json_name"} or not named & {"arguments", "parameters"}:
        raise FormError(f"{form.path}: call needs ${{name}} or ${{json_name}}, and ${{arguments}} or ${{parameters}}")
    if "parameters" in named and not form.given.get("parameter"):
        raise FormError(f"{form.path}: call has ${{parameters}}, and no parameter says how one is written")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
