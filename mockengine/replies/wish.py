# SPDX-License-Identifier: Apache-2.0
"""What somebody wants of a reply: a script, or the request itself."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Final, Protocol

from mockengine.replies.asked import Asked, ReplyError
from mockengine.wire.outputs import FinishReason, RequestError

_SAYING: Final = frozenset({"text", "token_ids", "reasoning", "tool_calls"})
_ENDING: Final = frozenset({"output_tokens", "finish_reason", "error"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: by name; a text is said as it is, be it JSON or not.

    """

    name: str
    arguments: Mapping[str, object] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTiming:
    """When a request says something, whatever the engine's own timing.

    Attributes:
        ttft_s: time from when it is scheduled to its first output, in seconds; infinite is never.
        itl_s: time from one output to the next, likewise.
        stalls_after: outputs after which nothing more is said; None is not to stall.
        stall_s: for how long; None is for ever.
        stretch: times as long everything takes that has no time of its own.

    """

    ttft_s: float | None = None
    itl_s: float | None = None
    stalls_after: int | None = None
    stall_s: float | None = None
    stretch: float | None = None

    def over(self, other: "OwnTiming") -> "OwnTiming":
        """Return this timing, with what it leaves open as the other has it."""
        return replace(other, **{name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is wanted of one reply; whatever is None stays as it would be.

    Attributes:
        text: said as the model's tokenizer has it, with whatever added tokens are named in it.
        token_ids: said instead of a text.
        reasoning: said before it, between the marks of reasoning.
        tool_calls: said after it, in the form of the frontend's parser.
        reasons: whether reasoning is made up for it, as for replies of which nobody wants anything.
        output_tokens: length of the reply, its last token included; a shorter text goes on from its beginning.
        finish_reason: why it ends.
        error: with finish reason ERROR, what the client is told.
        timing: when it is said.
        cached_tokens: tokens of the prompt that are said to have come out of the cache.
        rule: name of the rule of faults that strikes it.

    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] | None = None
    reasons: bool | None = None
    output_tokens: int | None = None
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    timing: OwnTiming | None = None
    cached_tokens: int | None = None
    rule: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether it is known what is said, and not only how."""
        # Asked of every request, so written out.
        return (
            self.text is not None
            or self.token_ids is not None
            or self.reasoning is not None
            or self.tool_calls is not None
        )

    def over(self, other: "Wish") -> "Wish":
        """Return this wish, with what it leaves open as the other has it.

        What is said is of one of them alone, and ends as that one has it; an error is of who says why it ends.
        """
        kept: frozenset[str] = frozenset()
        if self.says_something:
            kept = _SAYING | _ENDING | {"reasons"}
        elif self.finish_reason is not None:
            kept = frozenset({"error"})
        names = [each.name for each in fields(self) if each.name not in kept]
        missing = {name: getattr(other, name) for name in names if getattr(self, name) is None}
        if self.timing is not None and other.timing is not None:
            missing["timing"] = self.timing.over(other.timing)
        return Wish(**{each.name: getattr(self, each.name) for each in fields(self)} | missing)


NO_WISH: Final = Wish()


class WishSource(Protocol):
    """Whoever may want something of a reply."""

    def wish_for(self, asked: Asked) -> Wish | None:
        """Return what is wanted of the reply to a request; None is to leave it to others.

        Raises:
            ReplyError: the request asks for what cannot be given.

        """


class FaultSource(Protocol):
    """Whoever knows what goes wrong with requests."""

    def __call__(self, asked: Asked, named: str | None) -> Wish | None:
        """Return what becomes of a request, perhaps by the rule that its client names; None is nothing.

        Raises:
            ReplyError: there is no rule of that name.

        """


def nothing_strikes(asked: Asked, named: str | None) -> Wish | None:  # noqa: ARG001 - a FaultSource
    """Return None where there are no rules; raises `ReplyError` if a client names one."""
    if named is not None:
        raise ReplyError(f"fault: there is none of the name {named}")
    return None
