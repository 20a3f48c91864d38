# SPDX-License-Identifier: Apache-2.0
"""How reasoning is written: between marks that the frontends' reasoning parsers look for, which are in data files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mockengine.replies.form_files import FormError, check_form, form_names, read_form
from mockengine.replies.tokenizer import Tokenizer

DEFAULT_REASONING_FORM: Final = "qwen3"
_FOLDER: Final = Path(__file__).parent / "forms" / "reasoning"
_KINDS: Final[Mapping[str, type]] = {"begin": str, "end": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningForm:
    """How reasoning is written.

    Attributes:
        name: the form's, or its file.
        begin: what comes before it: a mark, and perhaps space around it.
        end: what comes after it, likewise.

    """

    name: str
    begin: str
    end: str

    @property
    def begin_mark(self) -> str:
        """The mark that opens it."""
        return self.begin.strip()

    @property
    def end_mark(self) -> str:
        """The mark that closes it."""
        return self.end.strip()

    @property
    def space_before_end(self) -> str:
        """What is between the reasoning and the mark that closes it."""
        return self.end.partition(self.end_mark)[0]

    @property
    def closing(self) -> str:
        """The mark that closes it, and what follows."""
        return self.end.removeprefix(self.space_before_end)

    def is_in(self, tokenizer: Tokenizer) -> bool:
        """Return whether a tokenizer has the marks as tokens, by which frontends know them."""
        return {self.begin_mark, self.end_mark} <= tokenizer.added_ids.keys()

    def said(self, reasoning: str, *, opens: bool) -> str:
        """Return reasoning as it is written, with the mark that opens it unless the prompt has it."""
        return (self.begin if opens else "") + reasoning + self.end


def reasoning_forms() -> Sequence[str]:
    """Return the names of the forms that come along."""
    return form_names(_FOLDER)


def load_reasoning_form(named: str = DEFAULT_REASONING_FORM) -> ReasoningForm:
    """Read a form that comes along, by its name, or another one from its file.

    Raises:
        FormError: there is none, or it cannot be used.

    """
    form = read_form(named, _FOLDER)
    check_form(form, _KINDS, {})
    missing = [key for key in _KINDS if not form.given.get(key, "").strip()]
    if missing:
        raise FormError(f"{form.path}: {' and '.join(missing)} must be a mark, such as <think>, and space around it")
    if form.given["begin"].strip() == form.given["end"].strip():
        raise FormError(f"{form.path}: begin and end have the same mark, so no parser could tell them apart")
    return ReasoningForm(name=named, **form.given)
