# SPDX-License-Identifier: Apache-2.0
"""Which tokens a request may be answered with: what its client, the tokenizer and the kind of reply leave."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

from mockengine.replies.random import RandomTokens
from mockengine.replies.vocabulary import Vocabulary
from mockengine.wire.sampling import SamplingParams

# A bias from which on a token is as good as decided, or ruled out: the ends of the API's range.
_DECIDES: Final = 100.0
# Restrictions that are remembered; nearly all requests have one of very few.
_KEPT: Final = 64
_KEPT_IDS: Final = 4_096

_Restriction: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client wants of tokens that are said on purpose.

    Attributes:
        ruled_out: not said.
        only: said alone; None is all.

    """

    ruled_out: AbstractSet[int]
    only: AbstractSet[int] | None


class Choice:
    """What may be said.

    Attributes:
        vocabulary: the tokens that are said by chance: they do not end a reply.
        source: of these.
        stop: the token that a reply ends with as soon as it may, because nothing else can be said.

    """

    __slots__ = ("__weakref__", "_only", "_ruled_out", "source", "stop", "vocabulary")

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: int | None = None,
        ruled_out: AbstractSet[int] = frozenset(),
        only: AbstractSet[int] | None = None,
    ) -> None:
        """Let these be said.

        Args:
            vocabulary: by chance.
            stop: instead of them.
            ruled_out: not on purpose either, because a client forbids it.
            only: on purpose at most, because a client allows nothing else; None is all.

        """
        self.vocabulary = vocabulary
        self.source = RandomTokens(vocabulary)
        self.stop = stop
        self._ruled_out = ruled_out
        self._only = only

    @property
    def limits(self) -> Limits | None:
        """What a client forbids and what alone it allows, which hold for whatever is said; None is no limit."""
        return None if self._only is None and not self._ruled_out else Limits(self._ruled_out, self._only)

    def permitted(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return those of the tokens that are meant to be said which a client does not forbid."""
        if self._only is None and not self._ruled_out:
            return token_ids
        only, ruled_out = self._only, self._ruled_out
        return [token for token in token_ids if token not in ruled_out and (only is None or token in only)]


class Choices:
    """What requests may be answered with; that of equal restrictions is made once."""

    def __init__(self, vocab_size: int, special_ids: AbstractSet[int], only: AbstractSet[int] | None) -> None:
        """Set up for a vocabulary.

        Args:
            vocab_size: ids lie below it.
            special_ids: those of them that are said only where a client names them.
            only: what is said unless a client names what is; None is all.

        """
        self._vocab_size = vocab_size
        self._special_ids = special_ids
        self._only = only
        self._kept: OrderedDict[_Restriction, Choice] = OrderedDict()

    def of(self, params: SamplingParams) -> Choice:
        """Return what a request with these parameters may be answered with."""
        bias = params.logit_bias or {}
        restriction = (
            params.all_stop_token_ids,
            params.stop_token_ids,
            params.eos_token_id,
            params.bad_words_token_ids,
            params.allowed_token_ids,
            frozenset([item for item in bias.items() if abs(item[1]) >= _DECIDES]) if bias else None,
        )
        choice = self._kept.get(restriction)
        if choice is None:
            choice = self._make(params, bias)
            ids = len(params.allowed_token_ids or ()) + len(params.bad_words_token_ids) + len(bias)
            if ids <= _KEPT_IDS:
                self._kept[restriction] = choice
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return choice

    def _make(self, params: SamplingParams, bias: Mapping[int, float]) -> Choice:
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
        clients = only
        if only is None:
            # Those that a client names are not said by chance.
            avoided |= self._special_ids
            only = self._only
        with suppress(ValueError):
            return Choice(Vocabulary(self._vocab_size, avoided | ruled_out, only), None, ruled_out, clients)
        stop = min((only or frozenset()) & (ends - ruled_out), default=None)
        if stop is None and only is not None:
            with suppress(ValueError):
                return Choice(Vocabulary(self._vocab_size, ruled_out, only), None, ruled_out, clients)
        # Nothing is left but to stop, or nothing at all, which no model can do: that one says anything.
        with suppress(ValueError):
            return Choice(Vocabulary(self._vocab_size, avoided), stop, ruled_out, clients)
        return Choice(Vocabulary(self._vocab_size), stop, ruled_out, clients)
