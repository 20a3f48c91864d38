# SPDX-License-Identifier: Apache-2.0
"""When a reply stops: how many tokens it has, and why it ends there."""

from mockengine.wire.outputs import FinishReason
from mockengine.wire.record import record
from mockengine.wire.sampling import SamplingParams


@record
class Ending:
    """How a reply ends.

    Attributes:
        output_tokens: all of its tokens, the last one included.
        finish_reason: LENGTH or STOP.
        last_token: the EOS id that a STOP ends with; frontends drop the text of that token.

    """

    output_tokens: int
    finish_reason: FinishReason = FinishReason.LENGTH
    last_token: int | None = None


def plan_ending(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int, default_output_tokens: int
) -> Ending:
    """Decide the end of a reply before it begins.

    A client that sets no `max_tokens` gets the frontend's `max_tokens` = all the context that is left. A model would
    end such a reply by itself, so this one ends after `default_output_tokens` (0: it does not), naturally where it has
    an EOS id. `min_tokens` is kept.

    Args:
        params: what the client asked.
        num_prompt_tokens: at most `max_model_len`.
        max_model_len: prompt and reply together.
        default_output_tokens: length of a reply whose client set none, in tokens.

    """
    context_left = max_model_len - num_prompt_tokens
    most = context_left if params.max_tokens is None else min(params.max_tokens, context_left)
    natural = max(default_output_tokens, params.min_tokens)
    if most < context_left or default_output_tokens == 0 or natural >= most:
        return Ending(most)
    if params.eos_token_id is None:
        return Ending(natural)
    return Ending(natural, FinishReason.STOP, params.eos_token_id)
