# SPDX-License-Identifier: Apache-2.0
"""What can be known of the engine from outside of its thread: its state at one moment, and its counts so far.

The engine's thread writes, others read. A status is made for whoever asks and never changes; a count only grows. So
readers take no lock and hold nobody up.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

LATENESS_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
"""Upper bounds of the histogram of lateness: a step is late by microseconds on an idle machine."""


class State(StrEnum):
    """Where a rank is in its life."""

    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank.

    Attributes:
        engine: its index.
        running: requests that it steps.
        waiting: requests that it has accepted and not stepped yet.

    """

    engine: int
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The engine at one moment.

    Attributes:
        state: of every rank of the process, since they join and leave together.
        turned_at: when its thread last went through its loop, in seconds of the monotonic clock.
        ranks: each rank of the process.
        clients: API servers of the frontend; 0 while there is none.
        connected_clients: those whose connection stands.
        buffered_bytes: what waits for each client that does not read, by client index.

    """

    state: State
    turned_at: float
    ranks: tuple[RankStatus, ...]
    clients: int = 0
    connected_clients: int = 0
    buffered_bytes: tuple[int, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self.state is State.SERVING and self.connected_clients == self.clients


@dataclass(slots=True)
class Lateness:
    """How long after they were due steps were made.

    Attributes:
        buckets: steps by the bound of `LATENESS_BUCKETS_S` that they stayed within; one more for those beyond the last.
        sum_s: of all steps together, in seconds.

    """

    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, steps: int, lateness_s: float) -> None:
        """Count steps that were made at once."""
        self.buckets[bisect_left(LATENESS_BUCKETS_S, lateness_s)] += steps
        self.sum_s += steps * lateness_s


@dataclass(slots=True)
class Counts:
    """What has happened since the process started.

    Attributes:
        joins: frontends joined.
        frontends_lost: frontends that went away.
        finished: requests by finish reason.
        refused: requests that were answered with an error instead of being accepted.
        prompt_tokens: of accepted requests.
        output_tokens: tokens said.
        dropped: messages that could not be read, by category.
        stalls: how often each client made its requests wait because it did not read, by index.
        lateness: of steps.
        faults: that have struck on purpose, by name.

    """

    joins: int = 0
    frontends_lost: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    stalls: Counter[int] = field(default_factory=Counter)
    lateness: Lateness = field(default_factory=Lateness)
    faults: Counter[str] = field(default_factory=Counter)
