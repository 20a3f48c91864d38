# SPDX-License-Identifier: Apache-2.0
"""An engine on a virtual clock, and everything it said, decoded as strictly as a real frontend decodes it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mockengine.engine.config import EngineConfig
from mockengine.engine.core import EngineCore
from mockengine.engine.dialect import Dialect
from mockengine.engine.observer import Served
from mockengine.engine.outgoing import COORDINATOR, Outbound
from mockengine.engine.ranks import Ranks
from mockengine.faults.injector import Injector
from mockengine.faults.rules import rules_of
from mockengine.replies.located import Located
from mockengine.replies.planner import RepliesConfig
from mockengine.wire.lines import Line
from mockengine.wire.messages import Abort, Add, Message, Unreadable
from mockengine.wire.outputs import EngineCoreOutput, Envelope, FinishReason, StepOutputs, read_envelope
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams

CONFIG = EngineConfig(
    max_model_len=64,
    block_size=16,
    output_token_chunk_size=1,
    replies=RepliesConfig(vocab_size=32_000),
    data_parallel_size=1,
    clients=1,
    has_coordinator=False,
    has_waves=False,
)
EOS = 7


def request(
    request_id: str = "r1",
    *,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int | None = 4,
    client: int = 0,
    **fields: object,
) -> EngineCoreRequest:
    """Make a request of a Python frontend of the newest line."""
    made = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=array("I", prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        client_index=client,
        sampling_keys=frozenset({"max_tokens", "stop"}),
    )
    return replace(made, **fields)  # type: ignore[arg-type]  # the names are those of the class


@dataclass
class Watcher:
    """An observer that remembers."""

    started: list[Served] = field(default_factory=list)
    finished: list[tuple[Served, str, float]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[Unreadable] = field(default_factory=list)
    transfers_ignored: list[tuple[str, str]] = field(default_factory=list)
    contradicted: list[tuple[str, int]] = field(default_factory=list)
    faults: list[tuple[str, str, int | None, str | None]] = field(default_factory=list)
    tokens: int = 0

    def fault_fired(self, rule: str, fault: str, engine: int | None, request_id: str | None) -> None:
        self.faults.append((rule, fault, engine, request_id))

    def request_started(self, request: Served) -> None:
        self.started.append(request)

    def tokens_said(self, count: int) -> None:
        self.tokens += count

    def request_finished(self, request: Served, finish_reason: str, duration_s: float) -> None:
        self.finished.append((request, finish_reason, duration_s))

    def request_refused(self, request_id: str, engine: int, client: int, reason: str) -> None:  # noqa: ARG002
        self.refused.append((request_id, reason))

    def transfer_ignored(self, request_id: str, engine: int, client: int, reason: str) -> None:  # noqa: ARG002
        self.transfers_ignored.append((request_id, reason))

    def message_dropped(self, message: Unreadable, engine: int, client: int | None) -> None:  # noqa: ARG002
        self.dropped.append(message)

    def release_contradicted(self, seen: str, items: int) -> None:
        self.contradicted.append((seen, items))


class Rig:
    """Some ranks, a clock that only the test moves, and what was heard."""

    def __init__(
        self, config: EngineConfig = CONFIG, *, ranks: int = 1, line: Line | None = None, faults: Sequence[object] = ()
    ) -> None:
        self.now = 100.0
        self.watcher = Watcher()
        self.dialect = Dialect(line)
        self.injector = Injector(rules_of(Located(list(faults))), config.replies.seed, self.watcher)
        self.injector.begin(self.now)
        self.ranks = Ranks(
            [EngineCore(rank, config, self.dialect, self.watcher, injector=self.injector) for rank in range(ranks)]
        )
        self.heard: list[tuple[int, Envelope]] = []
        self.sent: list[list[bytes]] = []
        """The frames of every message."""
        self.decodes = True
        """Whether what is sent is decoded, which what is wrong on purpose cannot be."""
        self.speaks: Line | None = None
        """The line to decode with; None is the one that the engine believes in."""

    def receive(self, message: Message, *, rank: int = 0, client: int = 0) -> list[Envelope]:
        return self._hear(self.ranks.engines[rank].receive(message, client, self.now))

    def add(self, *requests: EngineCoreRequest, rank: int = 0) -> None:
        for made in requests:
            self.receive(Add(made), rank=rank, client=made.client_index)

    def abort(self, *request_ids: str, rank: int = 0, client: int = 0) -> list[Envelope]:
        return self.receive(Abort(request_ids), rank=rank, client=client)

    def step(self, blocked: frozenset[int] = frozenset()) -> list[Envelope]:
        """Step once, a millisecond later, whatever is due."""
        self.now += 0.001
        return self._hear(self.ranks.step(self.now, blocked))

    def step_when_due(self) -> bool:
        """Step at the very moment that is due; tell whether there is one."""
        due = self.ranks.next_deadline(self.now, frozenset())
        if due is not None:
            self.now = max(self.now, due)
            self._hear(self.ranks.step(self.now, frozenset()))
        return due is not None

    def burst(self, blocked: frozenset[int], most_steps: int) -> int:
        """Step at once as often as can be, a millisecond later; return how often that was."""
        self.now += 0.001
        outbound = self.ranks.step(self.now, blocked, most_steps)
        self._hear(outbound)
        return max((len(message.messages) for message in outbound), default=1)

    def run(self, most_steps: int = 1_000) -> None:
        """Step until nothing is due any more."""
        for _ in range(most_steps):
            if self.ranks.next_deadline(self.now, frozenset()) is None:
                return
            self.step()
        raise AssertionError(f"still stepping after {most_steps} steps")

    def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        return [
            output
            for _, envelope in self.heard
            if isinstance(envelope, StepOutputs)
            for output in envelope.outputs
            if output.request_id == request_id
        ]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs(request_id) for token in output.new_token_ids]

    def finish_reason(self, request_id: str) -> FinishReason | None:
        outputs = self.outputs(request_id)
        return outputs[-1].finish_reason if outputs else None

    def to(self, destination: int) -> list[Envelope]:
        return [envelope for heard_by, envelope in self.heard if heard_by == destination]

    @property
    def to_coordinator(self) -> list[Envelope]:
        return self.to(COORDINATOR)

    def _hear(self, outbound: list[Outbound]) -> list[Envelope]:
        self.sent += [[bytes(frame) for frame in frames] for message in outbound for frames in message.messages]
        if not self.decodes:
            return []
        heard = [
            (message.destination, read_envelope([bytes(frame) for frame in frames], self.speaks or self.dialect.line))
            for message in outbound
            for frames in message.messages
        ]
        self.heard += heard
        return [envelope for _, envelope in heard]
