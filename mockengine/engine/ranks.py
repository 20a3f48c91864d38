# SPDX-License-Identifier: Apache-2.0
"""The ranks of this process, which know of each other whether all are idle."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from mockengine.engine.core import EngineCore
from mockengine.engine.outgoing import Outbound


class Ranks:
    """Every rank that one process runs for one frontend."""

    def __init__(self, engines: Sequence[EngineCore]) -> None:
        self.engines = tuple(engines)
        # Ranks that do not step, by a fault.
        self._frozen: set[int] = set()

    def freeze(self, rank: int) -> None:
        """Let a rank step no more, until it is thawed."""
        self._frozen.add(rank)

    def thaw(self, rank: int) -> None:
        """Let a rank step again."""
        self._frozen.discard(rank)

    @property
    def num_requests(self) -> int:
        """Requests waiting and running on all ranks."""
        return sum(engine.num_requests for engine in self.engines)

    @property
    def can_go_on(self) -> bool:
        """Whether any rank has work that will be done, other than by ending a pause."""
        return any(engine.can_go_on for engine in self.engines)

    @property
    def _going(self) -> Sequence[EngineCore]:
        if not self._frozen:
            return self.engines
        return [engine for engine in self.engines if engine.rank not in self._frozen]

    @property
    def _wave_is_over(self) -> bool:
        """Whether a wave runs of which no rank here has any work."""
        for engine in self.engines:
            if engine.wave.running:
                return not self.can_go_on
        return False

    def next_deadline(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the first of the ranks has a step due, or None while none has anything to do."""
        if self._wave_is_over:
            return now
        earliest: float | None = None
        for engine in self._going:
            deadline = engine.next_deadline(now, blocked)
            if deadline is not None and (earliest is None or deadline < earliest):
                earliest = deadline
        return earliest

    def step(self, now: float, blocked: AbstractSet[int], most_steps: int = 1) -> list[Outbound]:
        """Step the ranks whose deadline has come, then end the wave if none of them has anything left to do.

        Args:
            now: the time, in engine seconds.
            blocked: clients that take no more output for now.
            most_steps: how many steps a rank may make at once, where these have no pace.

        """
        outbound: list[Outbound] = []
        for engine in self._going:
            deadline = engine.next_deadline(now, blocked)
            if deadline is not None and deadline <= now:
                outbound += engine.step(now, blocked, most_steps)
        if self._wave_is_over:
            for engine in self.engines:
                outbound += engine.end_wave(now)
        return outbound

    def begin_shutdown(self) -> None:
        """Accept nothing any more; what runs goes on."""
        for engine in self.engines:
            engine.begin_shutdown()

    def abort_everything(self, now: float) -> list[Outbound]:
        """End all requests with an ABORT output."""
        return [message for engine in self.engines for message in engine.abort_everything(now)]
