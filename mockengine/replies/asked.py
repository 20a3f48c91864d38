# SPDX-License-Identifier: Apache-2.0
"""A request, as those see it who decide on its reply."""

from functools import cached_property

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
