# SPDX-License-Identifier: Apache-2.0
"""What an engine reports to whoever watches it. The engine itself writes nothing and counts nothing."""

from typing import Protocol

from mockengine.wire.messages import Unreadable
from mockengine.wire.record import record


@record
class Served:
    """One request's life, as far as it got.

    Attributes:
        request_id: the frontend's internal id.
        engine: rank that serves it.
        client: index of the API server that asked.
        prompt_tokens: length of its prompt.
        max_tokens: what was asked; None is as many as the context allows.
        output_tokens: tokens said so far.

    """

    request_id: str
    engine: int
    client: int
    prompt_tokens: int
    max_tokens: int | None
    output_tokens: int


class Observer(Protocol):
    """Hears of what happens to requests and messages."""

    def request_started(self, request: Served) -> None:
        """Hear that a request was accepted."""

    def tokens_said(self, count: int) -> None:
        """Hear how many tokens one step has said, over all requests."""

    def request_finished(self, request: Served, finish_reason: str, duration_s: float) -> None:
        """Hear that an accepted request ended, `duration_s` seconds after it was accepted."""

    def request_refused(self, request_id: str, engine: int, client: int, reason: str) -> None:
        """Hear that a request was answered with an error instead of being accepted."""

    def transfer_ignored(self, request_id: str, engine: int, client: int, reason: str) -> None:
        """Hear that a request's `kv_transfer_params` cannot be followed; it is computed here."""

    def message_dropped(self, message: Unreadable, engine: int, client: int | None) -> None:
        """Hear that a message could not be read; no client means that it came from the coordinator."""

    def release_contradicted(self, seen: str, items: int) -> None:
        """Hear that the frontend's first request, of `items` items, is not of the release that a setting names.

        `seen` names the lines whose layout it has.
        """
