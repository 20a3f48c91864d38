# SPDX-License-Identifier: Apache-2.0
"""A request, as those see it who decide on its reply."""

from functools import cached_property

from mockengine.replies.chat_forms import UserMessage, last_user_message
from mockengine.replies.tokenizer import Tokenizer
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams


class ReplyError(ValueError):
    """A reply that cannot be given; the text is for the client, who gets it as a `validation_error`."""


class Asked:
    """What is asked.

    Attributes:
        request: as the frontend sent it.
        params: what the client asks of the reply.
        key: of the reply.

    """

    def __init__(
        self, request: EngineCoreRequest, params: SamplingParams, key: int, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.params = params
        self.key = key
        self._tokenizer = tokenizer

    @cached_property
    def prompt_text(self) -> str | None:
        """The text of the prompt, added tokens included; None without a tokenizer, or for a prompt of embeddings."""
        if self._tokenizer is None or self.request.prompt_token_ids is None:
            return None
        return self._tokenizer.decode(self.request.prompt_token_ids)

    @cached_property
    def prompt_bytes(self) -> bytes:
        """The tokens of the prompt, each as an unsigned 32-bit number of this machine; none of one of embeddings."""
        tokens = self.request.prompt_token_ids
        return b"" if tokens is None else tokens.tobytes()

    @cached_property
    def last_message(self) -> UserMessage | None:
        """What the user said last, or all of a prompt where nobody is marked as the user.

        A frontend may have put a token before it that begins every prompt, which nobody has said. None where
        `prompt_text` is.
        """
        if self._tokenizer is None or self.prompt_text is None:
            return None
        found = last_user_message(self.prompt_text)
        if found is not None:
            return found
        tokens, special_ids = self.request.prompt_token_ids or (), self._tokenizer.special_ids
        start = next((place for place, token in enumerate(tokens) if token not in special_ids), len(tokens))
        text = self.prompt_text if start == 0 else self._tokenizer.decode(tokens[start:])
        return UserMessage(text.strip())
