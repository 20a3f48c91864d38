# SPDX-License-Identifier: Apache-2.0
"""How a request is answered: with which tokens, how many of them, and why they end there."""

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice
from typing import Final, TypeAlias

from mockengine.replies import TokenSource
from mockengine.replies.ending import Ending, RepetitionRule, listed_ending, natural_ending
from mockengine.replies.key import SeedScope, reply_key
from mockengine.replies.length import LengthDraw
from mockengine.replies.listed import ListedTokens
from mockengine.replies.logprobs import MAX_SCORES, TokenScorer
from mockengine.replies.random import RandomTokens
from mockengine.replies.scores import ReplyScores, wants_scores
from mockengine.replies.structured.constraint import Constraint, ConstraintError, read_constraint
from mockengine.replies.structured.writer import StructuredWriter, Written
from mockengine.replies.tokenizer import Tokenizer
from mockengine.replies.vocabulary import Vocabulary
from mockengine.wire.record import keyword_record
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

# A bias from which on a token is as good as decided, or ruled out: the ends of the API's range.
_DECIDES: Final = 100.0
# Restrictions that are remembered; nearly all requests have one of very few.
_KEPT: Final = 64
# Tokens of a reply that is held in memory as a whole, and looked at.
_MOST_LISTED: Final = 2**20
_KEPT_IDS: Final = 4_096

# As short as reasoning can be.
_NO_REASONING: Final = "<think>\n\n</think>\n\n"
_NOTHING: Final = ListedTokens(())

_Restriction: TypeAlias = tuple[object, ...]


class ReplyKind(StrEnum):
    """What replies are made of."""

    RANDOM = "random"
    WORDS = "words"
    ECHO = "echo"


class ReplyError(ValueError):
    """A reply that cannot be given; the text is for the client, who gets it as a `validation_error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepliesConfig:
    """What is said, and how much of it.

    Attributes:
        vocab_size: token ids that are made up lie below it.
        seed: decides all replies.
        seed_scope: what a reply depends on besides.
        default_output_tokens: length of a reply whose client set none; 0 is no end but that of the context.
        output_length: how long replies get by themselves; None is as long as clients allow.
        kind: what they are made of.
        tokenizer: the model's; None where text is of no interest.
        writer: of replies under constraints, with that tokenizer.

    """

    vocab_size: int
    seed: int = 0
    seed_scope: SeedScope = SeedScope.PROMPT
    default_output_tokens: int = 0
    output_length: LengthDraw | None = None
    kind: ReplyKind = ReplyKind.RANDOM
    tokenizer: Tokenizer | None = None
    writer: StructuredWriter | None = None


@keyword_record
class Plan:
    """A reply.

    Attributes:
        key: identifies it to the source.
        source: of its tokens.
        ending: its end.
        scores: of its tokens, where they are asked for.

    """

    key: int
    source: TokenSource
    ending: Ending
    scores: ReplyScores | None = None


class _Choice:
    """What may be said.

    Attributes:
        vocabulary: the tokens that do not end a reply.
        source: of these.
        stop: the token that a reply ends with as soon as it may, because nothing else can be said.

    """

    __slots__ = ("source", "stop", "vocabulary")

    def __init__(self, vocabulary: Vocabulary, stop: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.source = RandomTokens(vocabulary)
        self.stop = stop


class Planner:
    """Plans replies, each by itself: the same request gets the same one."""

    def __init__(self, config: RepliesConfig, max_model_len: int, most_tokens_per_output: int = 1) -> None:
        """Plan within a context of so many tokens of prompt and reply together, said so many at once at most."""
        self._config = config
        self._most_tokens_per_output = most_tokens_per_output
        self._max_model_len = max_model_len
        tokenizer = config.tokenizer
        self._special_ids = frozenset[int]() if tokenizer is None else tokenizer.special_ids
        self._words: AbstractSet[int] | None = None
        if tokenizer is not None and config.kind is ReplyKind.WORDS:
            self._words = frozenset(tokenizer.word_ids)
        self._vocab_size = config.vocab_size if tokenizer is None else min(config.vocab_size, tokenizer.vocab_size)
        self._scorer: TokenScorer | None = None
        self._choices: OrderedDict[_Restriction, _Choice] = OrderedDict()

    def plan(self, request: EngineCoreRequest) -> Plan:
        """Plan the reply to a request whose prompt fits the context; one that fills it gets no token.

        Raises:
            ReplyError: it asks for what cannot be written.

        """
        params = request.sampling_params or SamplingParams()
        key = reply_key(request, self._config.seed, self._config.seed_scope)
        room = self._max_model_len - request.num_prompt_tokens
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        scores = self._scores(request, params, key) if wants_scores(params) else None
        if most < 1:
            return Plan(key=key, source=_NOTHING, ending=Ending(0))
        choice = self._choice(params)
        listed = self._listed(request, params, key, min(most, _MOST_LISTED), choice)
        if listed is not None:
            ending = listed_ending(params, len(listed), listed) or Ending(len(listed))
            return Plan(key=key, source=ListedTokens(listed), ending=ending, scores=scores)
        ending = self._random_ending(params, key, most, room)
        if RepetitionRule.of(params.repetition_detection) is not None:
            return self._looked_at(params, key, choice.source, ending, scores)
        return Plan(key=key, source=choice.source, ending=ending, scores=scores)

    def _scores(self, request: EngineCoreRequest, params: SamplingParams, key: int) -> ReplyScores:
        """Return what scores the tokens of a reply."""
        if self._scorer is None:
            self._scorer = TokenScorer(self._vocab_size)
        scores = ReplyScores(self._scorer, key, self._config.seed, request, params)
        if scores.problem is not None:
            raise ReplyError(scores.problem)
        most = max(scores.prompt_scores, scores.columns * self._most_tokens_per_output)
        if most > MAX_SCORES:
            raise ReplyError(f"{most} logprobs in one output, where at most {MAX_SCORES} are given (ask for fewer)")
        return scores

    # How long.

    def _random_ending(self, params: SamplingParams, key: int, most: int, room: int) -> Ending:
        """Return where a reply ends whose tokens are never such as stop it.

        A client that sets no `max_tokens` gets the frontend's, which is all the context that is left. A model would end
        such a reply by itself, so this one ends after `default_output_tokens`, even where it has no EOS id.
        """
        if self._config.output_length is not None:
            return natural_ending(params, most, self._config.output_length(key))
        if most < room or self._config.default_output_tokens == 0:
            return Ending(most)
        ending = natural_ending(params, most, self._config.default_output_tokens)
        least = max(self._config.default_output_tokens, params.min_tokens)
        return ending if ending.last_token is not None or least >= most else Ending(least)

    def _looked_at(
        self, params: SamplingParams, key: int, source: TokenSource, ending: Ending, scores: ReplyScores | None
    ) -> Plan:
        """Plan a reply of which it matters whether it repeats itself."""
        said = source.tokens(key, 0, min(ending.output_tokens, _MOST_LISTED))
        if ending.last_token is not None and len(said) == ending.output_tokens:
            said[-1] = ending.last_token
        found = listed_ending(params, ending.output_tokens, said)
        if found is None:
            return Plan(key=key, source=source, ending=ending, scores=scores)
        return Plan(key=key, source=ListedTokens(said), ending=found, scores=scores)

    # Which tokens.

    def _listed(
        self, request: EngineCoreRequest, params: SamplingParams, key: int, most: int, choice: _Choice
    ) -> list[int] | None:
        """Return the tokens of a reply that is known from the start, up to its end; None is a random one."""
        if params.structured_outputs is not None and (constrained := self._constrained(request, params, key, most)):
            return constrained
        if params.trace_decode_token_ids is not None:
            said = list(params.trace_decode_token_ids[:most])
            return said + choice.source.tokens(key, len(said), most - len(said))
        if choice.stop is not None:
            return [*choice.source.tokens(key, 0, min(params.min_tokens, most - 1)), choice.stop]
        if self._config.kind is ReplyKind.ECHO:
            return self._echo(request, params, key, most, choice)
        return None

    def _constrained(self, request: EngineCoreRequest, params: SamplingParams, key: int, most: int) -> list[int] | None:
        """Return the tokens of a reply that keeps to a constraint, with EOS; None where there is no constraint.

        A reply whose EOS is ignored goes on with it, since nothing else may follow.
        """
        constraint = _read(params)
        if constraint is None:
            return None
        tokenizer, writer = self._config.tokenizer, self._config.writer
        if tokenizer is None or writer is None:
            raise ReplyError(
                f"this engine has no tokenizer to write {constraint.kind} with (set tokenizer to the folder of the "
                "frontend's model)"
            )
        # Python frontends let the constraint begin after the reasoning.
        said = tokenizer.encode(_NO_REASONING)[: most - 1] if request.reasoning_ended is False else []
        written = _written(writer, constraint, key, most - len(said))
        said += written.tokens
        if written.complete and len(said) < most and tokenizer.eos_ids:
            ignores_eos = params.eos_token_id is None
            said += [tokenizer.eos_ids[0]] * (most - len(said)) if ignores_eos else [params.eos_token_id or 0]
        return said

    def _echo(
        self, request: EngineCoreRequest, params: SamplingParams, key: int, most: int, choice: _Choice
    ) -> list[int]:
        """Return the prompt's tokens as far as they may be said, again and again where they have to be more."""
        allowed = [token for token in request.prompt_token_ids or () if token in choice.vocabulary]
        if not allowed:
            allowed = choice.source.tokens(key, 0, 1)
        length = len(allowed) + 1 if self._config.output_length is None else self._config.output_length(key)
        ending = natural_ending(params, most, length)
        said = list(islice(cycle(allowed), ending.output_tokens))
        if ending.last_token is not None:
            said[-1] = ending.last_token
        return said

    def _choice(self, params: SamplingParams) -> _Choice:
        """Return what a request may be answered with."""
        bias = params.logit_bias or {}
        restriction = (
            params.all_stop_token_ids,
            params.stop_token_ids,
            params.eos_token_id,
            params.bad_words_token_ids,
            params.allowed_token_ids,
            frozenset(item for item in bias.items() if abs(item[1]) >= _DECIDES),
        )
        choice = self._choices.get(restriction)
        if choice is None:
            choice = self._make_choice(params, bias)
            ids = len(params.allowed_token_ids or ()) + len(params.bad_words_token_ids) + len(bias)
            if ids <= _KEPT_IDS:
                self._choices[restriction] = choice
                if len(self._choices) > _KEPT:
                    self._choices.popitem(last=False)
        return choice

    def _make_choice(self, params: SamplingParams, bias: Mapping[int, float]) -> _Choice:
        ends = {*params.stop_token_ids} | ({params.eos_token_id} if params.eos_token_id is not None else set())
        # Ignored ones are no end, and still nothing that a model says by chance.
        avoided = ends | {*params.all_stop_token_ids}
        # Without its last token a bad word is not said, whatever comes before.
        ruled_out = {words[-1] for words in params.bad_words_token_ids if words}
        ruled_out.update(token for token, value in bias.items() if value <= -_DECIDES)
        only: AbstractSet[int] | None = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
        highest = max(bias.values(), default=0.0)
        if highest >= _DECIDES:
            decided = {token for token, value in bias.items() if value == highest}
            only = (decided if only is None else decided & only) or decided
        if only is None:
            # Those that a client names are not said by chance.
            avoided |= self._special_ids
            only = self._words
        with suppress(ValueError):
            return _Choice(Vocabulary(self._vocab_size, avoided | ruled_out, only))
        stop = min((only or frozenset()) & (ends - ruled_out), default=None)
        if stop is None and only is not None:
            with suppress(ValueError):
                return _Choice(Vocabulary(self._vocab_size, ruled_out, only))
        # Nothing is left but to stop, or nothing at all, which no model can do: that one says anything.
        with suppress(ValueError):
            return _Choice(Vocabulary(self._vocab_size, avoided), stop)
        return _Choice(Vocabulary(self._vocab_size), stop)


def _read(params: SamplingParams) -> Constraint | None:
    try:
        return read_constraint(params.structured_outputs)
    except ConstraintError as error:
        raise ReplyError(str(error)) from error


def _written(writer: StructuredWriter, constraint: Constraint, key: int, most: int) -> Written:
    try:
        return writer.write(constraint, key, most)
    except ConstraintError as error:
        raise ReplyError(str(error)) from error
    except Exception as error:
        # Whatever a client's constraint does to what reads it, it costs that client's request and no other.
        raise ReplyError(f"structured_outputs cannot be read: {type(error).__name__}: {error}") from error
