# SPDX-License-Identifier: Apache-2.0
"""What the ranks of this process publish of their KV caches, where somebody wants to know."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from mockengine.transport.kv_publisher import KvEventsPlan, KvPublisher
from mockengine.transport.sockets import make_context
from mockengine.wire.kv_events import AllBlocksCleared, KVCacheEvent

_LINGER_MS: Final = 500


class Publishers:
    """A publisher for each rank, as long as the process lives, or none.

    Frontends come and go; subscribers stay, and hear that the caches of new ranks are empty.
    """

    def __init__(self, plan: KvEventsPlan | None, ranks: Sequence[int], on_refused: Callable[[int, str], None]) -> None:
        """Open every rank's sockets.

        Args:
            plan: how to publish; None is not at all.
            ranks: of this process.
            on_refused: hears of a rank and of why it refused a replay, in another thread.

        Raises:
            KvEventsError: an address that cannot be used.

        """
        self._of_rank: dict[int, KvPublisher] = {}
        self._has_published = False
        self._cleanup = ExitStack()
        if plan is None:
            return
        # Of their own: looking up a subscriber's name must not delay requests.
        context = make_context()
        with ExitStack() as opened:
            opened.callback(context.term)
            for rank in ranks:
                publisher = KvPublisher(context, plan, rank, lambda reason, rank=rank: on_refused(rank, reason))  # type: ignore[misc]
                opened.callback(publisher.close, _LINGER_MS)
                self._of_rank[rank] = publisher
            self._cleanup = opened.pop_all()

    def config(self, rank: int) -> dict[str, object] | None:
        """Return what the frontend is told of a rank's publisher."""
        publisher = self._of_rank.get(rank)
        return None if publisher is None else publisher.config()

    def sink(self, rank: int) -> Callable[[Sequence[KVCacheEvent]], None] | None:
        """Return what publishes the events of a rank."""
        publisher = self._of_rank.get(rank)
        return None if publisher is None else lambda events: publisher.publish(events, time.time())

    def begin(self) -> None:
        """Tell subscribers that the caches are those of new ranks, unless there were none before."""
        for publisher in self._of_rank.values():
            if self._has_published:
                publisher.publish([AllBlocksCleared()], time.time())
        self._has_published = True

    def close(self) -> None:
        """Close everything; what was published may still leave for a moment."""
        self._cleanup.close()
