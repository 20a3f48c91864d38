# SPDX-License-Identifier: Apache-2.0
"""How a request is answered: with which tokens, how many of them, and why they end there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from mockengine.replies import TokenSource
from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.choices import Choice, Choices
from mockengine.replies.constrained import constrained_tokens
from mockengine.replies.ending import Ending, RepetitionRule, listed_ending, natural_ending
from mockengine.replies.forms import ToolCallForm, load_form
from mockengine.replies.key import SeedScope, reply_key
from mockengine.replies.length import LengthDraw
from mockengine.replies.listed import ListedTokens
from mockengine.replies.logprobs import MAX_SCORES, TokenScorer
from mockengine.replies.pooling import Pooler, Pooling
from mockengine.replies.reasoning import Preceded, Reasoning
from mockengine.replies.reasoning_form import load_reasoning_form
from mockengine.replies.scores import ReplyScores, wants_scores
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.told import forced_ending, told
from mockengine.replies.wish import NO_WISH, FaultSource, OwnTiming, Wish, WishSource, nothing_strikes
from mockengine.wire.outputs import FinishReason
from mockengine.wire.record import keyword_record
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

# Tokens of a reply that is held in memory as a whole, and looked at.
_MOST_LISTED: Final = 2**20
_NOTHING: Final = ListedTokens(())


class ReplyKind(StrEnum):
    """What replies are made of."""

    RANDOM = "random"
    WORDS = "words"
    ECHO = "echo"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepliesConfig:
    """What is said, and how much of it.

    Attributes:
        vocab_size: token ids that are made up lie below it.
        seed: decides all replies.
        seed_scope: what a reply depends on besides.
        default_output_tokens: length of a reply whose client set none; 0 is no end but that of the context.
        output_length: how long replies get by themselves; None is as long as clients allow.
        reasoning: what comes before, with that tokenizer; None is no more than there has to be.
        kind: what they are made of.
        tokenizer: the model's; None where text is of no interest.
        writer: of replies under constraints, with that tokenizer.
        wishes: who may want something of a reply, those first that others leave the rest to.
        tool_call_form: how tool calls are written.
        embedding_dim: numbers of an embedding.
        num_labels: classes.

    """

    vocab_size: int
    seed: int = 0
    seed_scope: SeedScope = SeedScope.PROMPT
    default_output_tokens: int = 0
    output_length: LengthDraw | None = None
    reasoning: Reasoning | None = None
    kind: ReplyKind = ReplyKind.RANDOM
    tokenizer: Tokenizer | None = None
    writer: StructuredWriter | None = None
    wishes: Sequence[WishSource] = ()
    tool_call_form: ToolCallForm = field(default_factory=load_form)
    embedding_dim: int = 256
    num_labels: int = 2


@keyword_record
class Plan:
    """A reply.

    Attributes:
        key: identifies it to the source.
        source: of its tokens.
        ending: its end.
        scores: of its tokens, where they are asked for.
        timing: when it is said, if that is not left to the engine.
        cached_tokens: tokens of the prompt that are said to have come out of the cache, if that is not left to it.
        pooling: what is said instead of tokens, which are none then.

    """

    key: int
    source: TokenSource
    ending: Ending
    scores: ReplyScores | None = None
    timing: OwnTiming | None = None
    cached_tokens: int | None = None
    pooling: Pooling | None = None


class Planner:
    """Plans replies, each by itself: the same request gets the same one."""

    def __init__(self, config: RepliesConfig, max_model_len: int, most_tokens_per_output: int = 1) -> None:
        """Plan within a context of so many tokens of prompt and reply together, said so many at once at most."""
        self._config = config
        self._most_tokens_per_output = most_tokens_per_output
        self._max_model_len = max_model_len
        tokenizer = config.tokenizer
        special_ids = frozenset[int]() if tokenizer is None else tokenizer.special_ids
        only = None if tokenizer is None or config.kind is not ReplyKind.WORDS else frozenset(tokenizer.word_ids)
        self._vocab_size = config.vocab_size if tokenizer is None else min(config.vocab_size, tokenizer.vocab_size)
        self._reasoning = config.reasoning
        if tokenizer is not None and self._reasoning is None:
            self._reasoning = Reasoning(tokenizer, load_reasoning_form())
        self._scorer: TokenScorer | None = None
        self._choices = Choices(self._vocab_size, special_ids, only)
        self._pooler = Pooler(config.embedding_dim, config.num_labels, config.seed)

    def plan(self, request: EngineCoreRequest, fault_for: FaultSource = nothing_strikes) -> Plan:
        """Plan the reply to a request whose prompt fits the context; one that fills it gets no token.

        Args:
            request: it.
            fault_for: tells what goes wrong with it, whatever anybody wants otherwise.

        Raises:
            ReplyError: it asks for what cannot be given.

        """
        params = request.sampling_params or SamplingParams()
        key = reply_key(request, self._config.seed, self._config.seed_scope)
        asked = Asked(request, params, key, self._config.tokenizer)
        if request.pooling_params is not None:
            wish = fault_for(asked, None) or NO_WISH
            ending = Ending(0, wish.finish_reason or FinishReason.STOP, error=wish.error)
            pooling = self._pooler.ask(request)
            return Plan(key=key, source=_NOTHING, ending=ending, timing=wish.timing, pooling=pooling)
        scores = self._scores(request, params, key) if wants_scores(params) else None
        wish = self._wish(asked) if self._config.wishes else NO_WISH
        struck = fault_for(asked, wish.rule)
        if struck is not None:
            wish = struck.over(wish)
        source, ending = self._reply(asked, wish)
        return Plan(
            key=key,
            source=source,
            ending=ending,
            scores=scores,
            timing=wish.timing,
            cached_tokens=wish.cached_tokens,
        )

    def _wish(self, asked: Asked) -> Wish:
        """Return what is wanted of a reply: each source has its say on what those before it leave open."""
        wish = NO_WISH
        for source in self._config.wishes:
            wanted = source.wish_for(asked)
            if wanted is not None:
                wish = wish.over(wanted)
        return wish

    def _reply(self, asked: Asked, wish: Wish) -> tuple[TokenSource, Ending]:
        """Return the tokens of a reply, and its end."""
        params = asked.params
        room = self._max_model_len - asked.request.num_prompt_tokens
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        if most < 1:
            return _NOTHING, Ending(0)
        if wish.finish_reason is not None and wish.output_tokens is not None:
            most = min(most, wish.output_tokens)
        choice = self._choices.of(params)
        if wish.says_something:
            most = min(most, _MOST_LISTED)
            wanted = choice.permitted(self._wanted(asked, wish, choice, most))
            said, ending = told(params, wanted, most, wish, partial(choice.source.tokens, asked.key, 0))
            return ListedTokens(said), ending
        listed = self._listed(asked, min(most, _MOST_LISTED), choice, wish)
        if listed is not None:
            ending = listed_ending(params, len(listed), listed) or Ending(len(listed))
            return ListedTokens(listed), forced_ending(params, ending, wish)
        span = self._span(asked, choice, min(most, _MOST_LISTED))
        source = Preceded(span, choice.source) if span else choice.source
        ending = forced_ending(params, self._random_ending(asked, most, room, wish, len(span)), wish)
        if RepetitionRule.of(params.repetition_detection) is not None:
            return self._looked_at(asked, source, ending)
        return source, ending

    def _scores(self, request: EngineCoreRequest, params: SamplingParams, key: int) -> ReplyScores:
        """Return what scores the tokens of a reply."""
        if self._scorer is None:
            self._scorer = TokenScorer(self._vocab_size)
        scores = ReplyScores(self._scorer, key, self._config.seed, request, params)
        if scores.problem is not None:
            raise ReplyError(scores.problem)
        most = max(scores.prompt_scores, scores.form.columns * self._most_tokens_per_output)
        if most > MAX_SCORES:
            raise ReplyError(f"{most} logprobs in one output, where at most {MAX_SCORES} are given (ask for fewer)")
        return scores

    # How long.

    def _length(self, asked: Asked, wish: Wish, reasoning: int) -> int | None:
        """Return how long a reply gets by itself, with so many tokens of reasoning; None is as long as it may."""
        if wish.output_tokens is not None:
            return wish.output_tokens
        return None if self._config.output_length is None else self._config.output_length(asked.key) + reasoning

    def _random_ending(self, asked: Asked, most: int, room: int, wish: Wish, reasoning: int) -> Ending:
        """Return where a reply ends whose tokens are never such as stop it.

        A client that sets no `max_tokens` gets the frontend's, which is all the context that is left. A model would end
        such a reply by itself, so this one ends after `default_output_tokens`, even where it has no EOS id.
        """
        length = self._length(asked, wish, reasoning)
        if length is not None:
            return natural_ending(asked.params, most, length)
        if most < room or self._config.default_output_tokens == 0:
            return Ending(most)
        default = self._config.default_output_tokens + reasoning
        ending = natural_ending(asked.params, most, default)
        least = max(default, asked.params.min_tokens)
        return ending if ending.last_token is not None or least >= most else Ending(least)

    def _looked_at(self, asked: Asked, source: TokenSource, ending: Ending) -> tuple[TokenSource, Ending]:
        """Return a reply of which it matters whether it repeats itself."""
        said = source.tokens(asked.key, 0, min(ending.output_tokens, _MOST_LISTED))
        if ending.last_token is not None and len(said) == ending.output_tokens:
            said[-1] = ending.last_token
        found = listed_ending(asked.params, ending.output_tokens, said)
        if found is None or found.output_tokens == ending.output_tokens:
            return source, ending
        return ListedTokens(said), found

    # Which tokens.

    def _wanted(self, asked: Asked, wish: Wish, choice: Choice, most: int) -> Sequence[int]:
        """Return the tokens that somebody wants to be said, without an end.

        Raises:
            ReplyError: a text is wanted, and there is no tokenizer, or it cannot be written.

        """
        if wish.token_ids is not None:
            return wish.token_ids
        if self._config.tokenizer is None or self._reasoning is None:
            raise ReplyError(
                "this engine has no tokenizer to say a text with (set tokenizer to the folder of the frontend's model)"
            )
        text = self._config.tool_call_form.said(wish.text or "", wish.tool_calls or ())
        if wish.reasoning is not None:
            text = self._reasoning.said(wish.reasoning, asked) + text
        said = self._config.tokenizer.encode(text)
        return [*self._reasoning.span(asked, choice, most), *said] if wish.reasons else said

    def _listed(self, asked: Asked, most: int, choice: Choice, wish: Wish) -> list[int] | None:
        """Return the tokens of a reply that is known from the start, up to its end; None is a random one."""
        params, key = asked.params, asked.key
        # Neither can be made as long as is wished, but both can be kept from being longer.
        at_most = most if wish.output_tokens is None else min(most, wish.output_tokens)
        if params.structured_outputs is not None:
            constrained = self._constrained(asked, params.structured_outputs, at_most, choice)
            if constrained:
                return constrained
        if params.trace_decode_token_ids is not None:
            said = list(params.trace_decode_token_ids[:at_most])
            return said + choice.source.tokens(key, len(said), at_most - len(said))
        if choice.stop is not None:
            return [*choice.source.tokens(key, 0, min(params.min_tokens, most - 1)), choice.stop]
        if self._config.kind is ReplyKind.ECHO:
            span = self._span(asked, choice, most)
            return [*span, *self._echo(asked, most - len(span), choice, wish, len(span))]
        return None

    def _constrained(
        self, asked: Asked, structured_outputs: Mapping[str, object], most: int, choice: Choice
    ) -> list[int] | None:
        before: list[int] = []
        if self._reasoning is not None:
            before, structured_outputs = self._reasoning.before_constraint(asked, structured_outputs, choice, most)
        writer = self._config.writer
        tokenizer = self._config.tokenizer
        return constrained_tokens(asked, structured_outputs, most, tokenizer, writer, before, choice.limits)

    def _span(self, asked: Asked, choice: Choice, most: int) -> list[int]:
        """Return the reasoning that comes before an answer that nobody has told."""
        return [] if self._reasoning is None else self._reasoning.span(asked, choice, most)

    def _echo(self, asked: Asked, most: int, choice: Choice, wish: Wish, reasoning: int) -> list[int]:
        """Return the prompt's tokens as far as they may be said, again and again where they have to be more."""
        allowed = [token for token in asked.request.prompt_token_ids or () if token in choice.vocabulary]
        if not allowed:
            allowed = choice.source.tokens(asked.key, 0, 1)
        if most < 1:
            return []
        length = self._length(asked, wish, reasoning)
        if length is not None:
            length = max(1, length - reasoning)
        made_up = partial(choice.source.tokens, asked.key, 0)
        return told(asked.params, allowed, most, Wish(output_tokens=length), made_up)[0]
