# SPDX-License-Identifier: Apache-2.0
"""Bursts of requests to the ranks of a mixture of experts, beside a coordinator and clients that hear of things late.

The coordinator is a double that follows protocol section 7: it counts waves, wakes those who sleep, and checks what it
is told. Every message takes its time, in order from each sender.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from mockengine.wire.messages import StartDpWave
from mockengine.wire.outputs import Envelope, StartWave, StepOutputs, WaveComplete
from tests.support.rig import CONFIG, Rig, request

BURSTS = 1_000


@dataclass
class Coordinator:
    """Keeps count of waves as vLLM's does.

    Attributes:
        wave: that runs, or the next one.
        is_running: whether one does.
        completed: numbers of those that are over, in the order in which it has heard so.
        counts: what every rank has last said of its load.
        wakes: what ranks are to hear, by rank.

    """

    ranks: int
    wave: int = 0
    is_running: bool = False
    completed: list[int] = field(default_factory=list)
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    wakes: dict[int, deque[StartDpWave]] = field(default_factory=dict)

    def hear(self, envelope: Envelope) -> None:
        """Take in what a rank says."""
        if isinstance(envelope, StartWave):
            is_new = envelope.wave > self.wave or (envelope.wave == self.wave and not self.is_running)
            if is_new:
                self.wave, self.is_running = envelope.wave, True
                self.wake(envelope.engine_index)
        elif isinstance(envelope, WaveComplete):
            assert envelope.engine_index == 0
            self.completed.append(envelope.wave)
            if envelope.wave >= self.wave:
                self.wave, self.is_running = envelope.wave + 1, False
        else:
            assert isinstance(envelope, StepOutputs)
            assert not envelope.outputs
            assert envelope.scheduler_stats is not None
            load = envelope.scheduler_stats
            counts = (load.num_running_reqs, load.num_waiting_reqs)
            assert counts != self.counts.get(envelope.engine_index, (0, 0)), "counts are said when they change"
            self.counts[envelope.engine_index] = counts

    def wake(self, exclude: int | bytes | None) -> None:
        """Have all ranks take part in the wave, but for one."""
        for rank in range(self.ranks):
            self.wakes.setdefault(rank, deque()).append(StartDpWave(self.wave, exclude))


class World:
    """Ranks, the coordinator, and a client that knows of the wave what it heard last."""

    def __init__(self, ranks: int, random: Random) -> None:
        self.random = random
        config = replace(CONFIG, data_parallel_size=ranks, has_coordinator=True, has_waves=True)
        self.rig = Rig(config, ranks=ranks)
        self.coordinator = Coordinator(ranks)
        self.heard = 0
        self.known = (0, False)
        self.requests = 0
        self.finished: Counter[str] = Counter()

    def burst(self) -> None:
        """Send some requests and let some time pass."""
        for _ in range(self.random.randint(1, 4)):
            self.send()
            self.pass_time(self.random.randint(0, 6))
        self.pass_time(self.random.choice((0, 3, 40)))

    def send(self) -> None:
        """Send a request to some rank, stamped with the wave that the client knows of."""
        rank = self.random.randrange(self.coordinator.ranks)
        if self.random.random() < 0.5:
            self.known = (self.coordinator.wave, self.coordinator.is_running)
        wave, is_running = self.known
        self.requests += 1
        made = request(f"r{self.requests}", max_tokens=self.random.randint(1, 5), current_wave=wave)
        self.rig.add(made, rank=rank)
        if self.random.random() < 0.1:
            self.rig.abort(made.request_id, rank=rank)
        if not is_running and self.random.random() < 0.5:
            # Clients of up to 0.32 have the coordinator wake the others, by an identity that no rank takes for its own.
            self.coordinator.wake(self.random.choice((None, rank, rank.to_bytes(2, "little"))))

    def pass_time(self, turns: int) -> None:
        """Let ranks step and messages arrive, each in its own time."""
        for _ in range(turns):
            if self.random.random() < 0.7 and self.rig.ranks.next_deadline(self.rig.now, frozenset()) is not None:
                self.rig.step()
            said = self.rig.to_coordinator
            while self.heard < len(said) and self.random.random() < 0.6:
                self.coordinator.hear(said[self.heard])
                self.heard += 1
            for rank, wakes in self.coordinator.wakes.items():
                if wakes and self.random.random() < 0.6:
                    self.rig.receive(wakes.popleft(), rank=rank, client=-1)

    @property
    def is_at_rest(self) -> bool:
        return (
            self.rig.ranks.next_deadline(self.rig.now, frozenset()) is None
            and self.heard == len(self.rig.to_coordinator)
            and not any(self.coordinator.wakes.values())
        )

    def forget(self) -> None:
        """Keep of what was said only which requests have been reported as finished."""
        for _, envelope in self.rig.heard:
            if isinstance(envelope, StepOutputs):
                self.finished.update(envelope.finished_requests)
        self.rig.heard.clear()
        self.rig.sent.clear()
        self.heard = 0

    def settle(self) -> None:
        for _ in range(1_000):
            if self.is_at_rest:
                return
            self.pass_time(1)
        raise AssertionError("it does not come to rest")


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_agree_on_waves_whatever_comes_when(ranks: int) -> None:
    world = World(ranks, Random(ranks))  # noqa: S311 - nothing is secret here
    for number in range(BURSTS):
        world.burst()
        if number % 50 == 0:
            world.settle()
            _check(world)
    world.settle()
    _check(world)


def _check(world: World) -> None:
    coordinator, engines = world.coordinator, world.rig.ranks.engines
    assert [(engine.wave.number, engine.wave.running) for engine in engines] == [(coordinator.wave, False)] * len(
        engines
    )
    assert not coordinator.is_running
    assert coordinator.completed == sorted(set(coordinator.completed)), "each wave ends once, in order"
    assert set(coordinator.counts.values()) <= {(0, 0)}
    ended = {served.request_id for served, _, _ in world.rig.watcher.finished}
    assert len(ended) == len(world.rig.watcher.finished) == world.requests
    world.forget()
    assert set(world.finished.values()) == {1}
    assert world.finished.keys() == ended
