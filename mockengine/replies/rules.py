# SPDX-License-Identifier: Apache-2.0
"""Rules of a script: which requests each of them is about, and which replies these get."""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, TypeAlias

from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.hashing import mixed, uniform
from mockengine.replies.steered import MOST_TEXT_BYTES
from mockengine.replies.template import Captures, Template, captures_of
from mockengine.replies.wish import ToolCall, Wish

Search: TypeAlias = Callable[[re.Pattern[str], str], re.Match[str] | None]
"""Searches a text for a pattern; raises `TimeoutError` where that takes too long."""

Arguments: TypeAlias = "Template | Mapping[str, Arguments] | Sequence[Arguments] | bool | float | None"
"""Arguments of a tool, whose texts are templates."""

# What is drawn from a reply's key here is independent of all else that is.
_PROBABILITY: Final = 0x70726F62
_CHOICE: Final = 0x63686F69


def search_freely(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Search for as long as it takes."""
    return pattern.search(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What must hold of a request; what is None holds of all.

    Attributes:
        prompt_contains: part of the text of the prompt.
        prompt_regex: to be found in it.
        last_message: part of what the user said last.
        last_message_regex: to be found in that.
        tool_rounds: how often the model has called tools since.
        token_prefix: tokens that the prompt begins with, as 32-bit numbers.
        token_ids: tokens that follow each other somewhere in it, likewise.
        lora: name of the adapter.
        probability: share of the requests of which all the above holds.
        nth: numbers of those that are meant, from 1 on.
        every: every how manyth of them is.

    """

    prompt_contains: str | None = None
    prompt_regex: re.Pattern[str] | None = None
    last_message: str | None = None
    last_message_regex: re.Pattern[str] | None = None
    tool_rounds: int | None = None
    token_prefix: bytes | None = None
    token_ids: bytes | None = None
    lora: str | None = None
    probability: float | None = None
    nth: frozenset[int] | None = None
    every: int | None = None

    def captures(self, asked: Asked, rule: int, search: Search) -> Captures | None:
        """Return what was captured of a request of which all holds but the number; None is not to hold.

        Args:
            asked: the request.
            rule: number of the rule, from which follows what is drawn.
            search: looks for patterns.

        Raises:
            TimeoutError: that takes too long.

        """
        if not self._holds(asked):
            return None
        matches = []
        for pattern, text in ((self.prompt_regex, _prompt), (self.last_message_regex, _last_message)):
            if pattern is not None:
                searched = text(asked)
                match = None if searched is None else search(pattern, searched)
                if match is None:
                    return None
                matches.append(match)
        if self.probability is not None and uniform(asked.key ^ mixed(_PROBABILITY + rule)) > self.probability:
            return None
        return captures_of(matches) if matches else ()

    def is_turn(self, number: int) -> bool:
        """Whether the request of that number is meant."""
        return (self.nth is None or number in self.nth) and (self.every is None or number % self.every == 0)

    def _holds(self, asked: Asked) -> bool:
        """Whether everything holds that is seen soon."""
        lora = asked.request.lora_request
        return (
            (self.lora is None or (lora is not None and lora.name == self.lora))
            and (self.token_prefix is None or asked.prompt_bytes.startswith(self.token_prefix))
            and (self.token_ids is None or _follow(self.token_ids, asked.prompt_bytes))
            and (self.prompt_contains is None or self.prompt_contains in (asked.prompt_text or ""))
            and (self.last_message is None or self.last_message in (_last_message(asked) or ""))
            and (self.tool_rounds is None or self.tool_rounds == _tool_rounds(asked))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTemplate:
    """A call of a tool with texts to fill in.

    Attributes:
        name: of the tool.
        arguments: by name, or one text.

    """

    name: str
    arguments: Mapping[str, Arguments] | Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply of a rule.

    Attributes:
        wish: what is wanted of every such reply.
        text: said, if there is something to fill in.
        reasoning: likewise.
        tool_calls: likewise.
        weight: how often it is taken among others.

    """

    wish: Wish
    text: Template | None = None
    reasoning: Template | None = None
    tool_calls: Sequence[CallTemplate] | None = None
    weight: float = 1.0

    def wish_for(self, captures: Captures) -> Wish:
        """Return what is wanted of one reply.

        Raises:
            ReplyError: what was captured makes it too large.

        """
        if self.text is None and self.reasoning is None and self.tool_calls is None:
            return self.wish
        filling = _Filling(captures)
        wish = self.wish
        if self.text is not None:
            wish = replace(wish, text=filling.text(self.text))
        if self.reasoning is not None:
            wish = replace(wish, reasoning=filling.text(self.reasoning))
        if self.tool_calls is not None:
            wish = replace(wish, tool_calls=[filling.call(call) for call in self.tool_calls])
        return wish


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule.

    Attributes:
        line: where it begins in its file.
        conditions: of its requests.
        replies: one of them is given, or each in turn; none leaves requests to others.
        in_order: whether each is given in turn, and not one by the reply's key.

    """

    line: int
    conditions: Conditions
    replies: Sequence[Reply]
    in_order: bool = False

    def reply(self, key: int, rule: int, number: int) -> Reply:
        """Return the reply to the request of that key, before which the rule of that number has answered so many."""
        if len(self.replies) == 1:
            return self.replies[0]
        if self.in_order:
            return self.replies[number % len(self.replies)]
        ends = list(accumulate(reply.weight for reply in self.replies))
        place = bisect_right(ends, uniform(key ^ mixed(_CHOICE + rule)) * ends[-1])
        return self.replies[min(place, len(self.replies) - 1)]


class Script:
    """Rules, of which the first one that holds has its way; and how often each has been asked."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """Begin with nobody having asked."""
        self._rules = rules
        self._matched = [0] * len(rules)
        self._answered = [0] * len(rules)

    def wish_for(self, asked: Asked, search: Search = search_freely) -> Wish | None:
        """Return what the first rule wants that a request is meant by, or None.

        Raises:
            ReplyError: it cannot be given, or a regex takes too long.

        """
        for number, rule in enumerate(self._rules):
            try:
                captures = rule.conditions.captures(asked, number, search)
            except TimeoutError as error:
                raise ReplyError(f"the rule on line {rule.line} of reply_script: {error}") from None
            if captures is None:
                continue
            self._matched[number] += 1
            if not rule.conditions.is_turn(self._matched[number]):
                continue
            reply = rule.reply(asked.key, number, self._answered[number])
            self._answered[number] += 1
            try:
                return reply.wish_for(captures)
            except ReplyError as error:
                raise ReplyError(f"the rule on line {rule.line} of reply_script: {error}") from None
        return None


class _Filling:
    """Fills what was captured into the templates of one reply, as long as that is not too much."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._left = MOST_TEXT_BYTES

    def text(self, template: Template) -> str:
        # Characters are known before there is a text of them, and are never more than its bytes.
        if template.length(self._captures) <= self._left:
            text = template.filled(self._captures)
            self._left -= len(text.encode())
            if self._left >= 0:
                return text
        raise ReplyError(f"with what the prompt has for it, the reply has more than {MOST_TEXT_BYTES} bytes")

    def call(self, call: CallTemplate) -> ToolCall:
        if isinstance(call.arguments, Template):
            return ToolCall(call.name, self.text(call.arguments))
        return ToolCall(call.name, {name: self._argument(value) for name, value in call.arguments.items()})

    def _argument(self, value: Arguments) -> object:
        if isinstance(value, Template):
            return self.text(value)
        if isinstance(value, Mapping):
            return {name: self._argument(item) for name, item in value.items()}
        return [self._argument(item) for item in value] if isinstance(value, list) else value


def _prompt(asked: Asked) -> str | None:
    return asked.prompt_text


def _last_message(asked: Asked) -> str | None:
    message = asked.last_message
    return None if message is None else message.text


def _tool_rounds(asked: Asked) -> int | None:
    message = asked.last_message
    return None if message is None else message.tool_rounds


def _follow(tokens: bytes, prompt: bytes) -> bool:
    """Whether 32-bit tokens follow each other in a prompt of such."""
    place = prompt.find(tokens)
    while place % 4 and place > 0:
        place = prompt.find(tokens, place + 1)
    return place >= 0
