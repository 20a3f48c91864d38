# SPDX-License-Identifier: Apache-2.0
"""What leaves a rank: encoded messages and where they go.

Whatever progressed in a step shares one message per client. Statistics go with the first of them, and finished ids
with whatever their client hears next. Nothing here is ever said twice or half.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from mockengine.engine.dialect import Dialect
from mockengine.engine.said import Said, Spoken
from mockengine.wire.batch import Messages, StepEncoder
from mockengine.wire.outputs import EngineCoreOutput, Envelope, StepOutputs, write_envelope
from mockengine.wire.record import record
from mockengine.wire.stats import SchedulerStats

COORDINATOR: Final = -1
"""Destination of what goes to the coordinator rather than to a client."""

_FIRST_CLIENT: Final = 0


@record
class Outbound:
    """Encoded messages, in order, and where they go.

    Attributes:
        destination: a client index or `COORDINATOR`.
        messages: the frames of each.

    """

    destination: int
    messages: Messages


_NOTHING: Final = Said()


class Outgoing:
    """Makes the messages of one rank, and remembers what they must say next.

    Attributes:
        weight_version: label of the weights, which outputs bear.

    """

    def __init__(self, rank: int, dialect: Dialect, weight_version: str) -> None:
        self.weight_version = weight_version
        self._rank = rank
        self._dialect = dialect
        self._encoder = StepEncoder(rank)
        self._finished_ids: dict[int, list[str]] = {}
        self._clients_told_of_load: set[int] = set()
        self._published: SchedulerStats | None = None

    @property
    def has_finished_ids(self) -> bool:
        """Whether a client is still to hear that a request has finished."""
        return bool(self._finished_ids)

    @property
    def has_been_told_of_load(self) -> bool:
        """Whether a client believes that there is load."""
        return bool(self._clients_told_of_load)

    def note_finished(self, client: int, request_id: str) -> None:
        """Remember to report an id; without a report a frontend that counts would think the rank ever busier."""
        self._finished_ids.setdefault(client, []).append(request_id)

    def encode(self, destination: int, envelope: Envelope) -> Outbound:
        """Return an envelope that is not a step."""
        return Outbound(destination, [write_envelope(envelope, self._dialect.line)])

    def step(
        self, spoken: Spoken, stats: Callable[[], SchedulerStats], now: float, blocked: AbstractSet[int]
    ) -> list[Outbound]:
        """Return what every client hears that has outputs or finished ids; the first of them gets the statistics.

        Args:
            spoken: what was said.
            stats: called if there is somebody to hear it.
            now: the time, in engine seconds.
            blocked: clients that take no more output for now, and hear nothing that they can do without.

        """
        said = spoken.said
        finished_ids, self._finished_ids = self._finished_ids, {}
        clients = sorted({*said, *finished_ids}) if finished_ids or len(said) > 1 else list(said)
        if not clients:
            if not spoken.is_reported or _FIRST_CLIENT in blocked:
                return []
            clients = [_FIRST_CLIENT]
        load = stats()
        told_of_load = clients[0] if spoken.first_client is None else spoken.first_client
        if load.num_running_reqs or load.num_waiting_reqs or load.num_skipped_waiting_reqs:
            self._clients_told_of_load.add(told_of_load)
        elif spoken.is_reported:
            self._clients_told_of_load.discard(told_of_load)
        outbound: list[Outbound] = []
        for client in clients:
            what = said.get(client, _NOTHING)
            step = StepOutputs(
                engine_index=self._rank,
                timestamp=now,
                outputs=what.outputs,
                scheduler_stats=load if client == told_of_load else None,
                finished_requests=finished_ids.get(client, ()),
                weight_version=self.weight_version,
            )
            outbound.append(Outbound(client, self._encoder.encode(step, self._dialect.line, what.rows, what.packed)))
        return outbound

    def load_is_gone(self, stats: Callable[[], SchedulerStats], now: float) -> list[Outbound]:
        """Tell every client that heard of load that nothing is left of it."""
        clients = sorted(self._clients_told_of_load)
        self._clients_told_of_load.clear()
        return [
            self.encode(
                client,
                StepOutputs(
                    engine_index=self._rank,
                    timestamp=now,
                    scheduler_stats=stats(),
                    weight_version=self.weight_version,
                ),
            )
            for client in clients
        ]

    def load_for_coordinator(self, load: SchedulerStats, wave: int, now: float) -> list[Outbound]:
        """Tell the coordinator how many requests run and wait, whenever that has changed."""
        known = self._published or SchedulerStats()
        self._published = load
        if (load.num_running_reqs, load.num_waiting_reqs) == (known.num_running_reqs, known.num_waiting_reqs):
            return []
        stats = replace(load, current_wave=wave)
        return [self.encode(COORDINATOR, StepOutputs(engine_index=self._rank, timestamp=now, scheduler_stats=stats))]

    def final_outputs(
        self, client: int, outputs: Sequence[EngineCoreOutput], finished_requests: Sequence[str], now: float
    ) -> Outbound:
        """Return the message that ends requests outside of a step."""
        return self.encode(
            client,
            StepOutputs(engine_index=self._rank, timestamp=now, outputs=outputs, finished_requests=finished_requests),
        )
