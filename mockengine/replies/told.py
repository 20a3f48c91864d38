# SPDX-License-Identifier: Apache-2.0
"""Replies whose tokens somebody has given: where they end, and how they go on if they have to."""

from collections.abc import Callable, Sequence
from itertools import cycle, islice

from mockengine.replies.ending import REPETITION, Ending, listed_ending, natural_ending
from mockengine.replies.wish import Wish
from mockengine.wire.outputs import FinishReason
from mockengine.wire.sampling import SamplingParams


def told(
    params: SamplingParams, token_ids: Sequence[int], most: int, wish: Wish, made_up: Callable[[int], Sequence[int]]
) -> tuple[list[int], Ending]:
    """Return a reply of these tokens, of at most so many, and its end.

    By itself it ends after them with EOS. Where it has to be longer, because of `min_tokens`, because EOS is ignored or
    by a wish for more tokens, they are said again and again; where there are none, so many are said that are made up.
    As in vLLM no stop token is said before `min_tokens` are.
    """
    if params.min_tokens:
        token_ids = _without_early_ends(params, token_ids)
    if wish.finish_reason is None:
        length = len(token_ids) + 1 if wish.output_tokens is None else wish.output_tokens
        ending = natural_ending(params, most, length)
    else:
        # An end token has a place of its own.
        has_end = wish.finish_reason is FinishReason.STOP and _end_token(params) is not None
        length = len(token_ids) + has_end
        ending = forced_ending(params, Ending(min(most, wish.output_tokens or length)), wish)
    room = ending.output_tokens - (ending.last_token is not None)
    said = list(islice(cycle(token_ids), room) if token_ids else made_up(room))
    if ending.last_token is not None:
        said.append(ending.last_token)
    stopped = listed_ending(params, len(said), said)
    if stopped is None or stopped.output_tokens == ending.output_tokens:
        return said, ending
    return said, stopped


def forced_ending(params: SamplingParams, ending: Ending, wish: Wish) -> Ending:
    """Return an ending with the reason that is wished for."""
    reason = wish.finish_reason
    if reason is None or reason is ending.finish_reason:
        return ending
    if reason is FinishReason.STOP:
        return Ending(ending.output_tokens, reason, None, _end_token(params))
    return Ending(
        ending.output_tokens, reason, REPETITION if reason is FinishReason.REPETITION else None, None, wish.error
    )


def _end_token(params: SamplingParams) -> int | None:
    """Return what a reply ends with for whom STOP is wished, even where it is ignored."""
    eos = (params.eos_token_id,) if params.eos_token_id is not None else ()
    return next(iter((*eos, *params.stop_token_ids, *params.all_stop_token_ids)), None)


def _without_early_ends(params: SamplingParams, token_ids: Sequence[int]) -> Sequence[int]:
    ends = {params.eos_token_id, *params.stop_token_ids, *params.all_stop_token_ids}
    said: list[int] = []
    for token in token_ids:
        if len(said) >= params.min_tokens or token not in ends:
            said.append(token)
    return said
