# SPDX-License-Identifier: Apache-2.0
"""Spans of reasoning: what a reply says before its answer, between the marks that reasoning parsers look for."""

from typing import Final

from mockengine.replies.asked import Asked
from mockengine.replies.tokenizer import Tokenizer

BEGIN: Final = "<think>"
END: Final = "</think>"
_OPENING: Final = f"{BEGIN}\n"
_CLOSING: Final = f"\n{END}\n\n"
# Enough of a prompt to see how it ends.
_LAST_TOKENS: Final = 16


def reasoned(reasoning: str, *, opens: bool) -> str:
    """Return the span of this reasoning, with the mark that opens it unless the prompt has it."""
    return (_OPENING if opens else "") + reasoning + _CLOSING


def begins_with_reasoning(asked: Asked, tokenizer: Tokenizer) -> bool:
    """Return whether the prompt has opened the reasoning, as chat templates of some models do."""
    return last_text(asked, tokenizer).rstrip().endswith(BEGIN)


def last_text(asked: Asked, tokenizer: Tokenizer) -> str:
    """Return how the prompt ends; nothing is known of one of embeddings."""
    return tokenizer.decode((asked.request.prompt_token_ids or ())[-_LAST_TOKENS:])
