# SPDX-License-Identifier: Apache-2.0
"""Where the engine is in its life, for whoever asks from another thread."""

from collections.abc import Sequence

from mockengine.engine.ranks import Ranks
from mockengine.journal import Journal
from mockengine.status import RankStatus, State, Status
from mockengine.transport.session import Session
from mockengine.transport.stop import StopSignal


class Watch:
    """Holds what the engine's thread works on, and tells how that is.

    The methods that change it belong to the engine's thread. `status` may be called from any: it reads single numbers
    that the engine's thread replaces as a whole, and touches no socket.
    """

    def __init__(self, ranks: Sequence[int], journal: Journal, stop: StopSignal, now: float) -> None:
        self._began_at = now
        self._journal = journal
        self._stop = stop
        self._idle_ranks = tuple(RankStatus(rank) for rank in ranks)
        self._served: tuple[Session, Ranks] | None = None

    def joining(self) -> None:
        """Note that there is no frontend."""
        self._served = None

    def serving(self, session: Session, ranks: Ranks) -> None:
        """Note that a frontend has been joined."""
        self._served = session, ranks

    def status(self) -> Status:
        """Return how the engine is now."""
        served = self._served
        state = State.JOINING if served is None else State.SERVING
        if self._stop.requested:
            state = State.LEAVING
        turned_at = max(self._began_at, self._journal.turned_at)
        if served is None:
            return Status(state, turned_at, self._idle_ranks)
        session, ranks = served
        return Status(
            state=state,
            turned_at=turned_at,
            ranks=tuple(RankStatus(engine.rank, engine.num_running, engine.num_waiting) for engine in ranks.engines),
            clients=len(session.init.inputs),
            connected_clients=len(session.connected_clients),
            buffered_bytes=tuple(outbox.buffered_bytes for outbox in session.outputs),
        )
