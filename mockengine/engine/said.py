# SPDX-License-Identifier: Apache-2.0
"""What a rank says in a step, before it is encoded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mockengine.engine.requests import Request
from mockengine.wire.batch import Rows
from mockengine.wire.outputs import EngineCoreEvent, EngineCoreOutput, FinishReason


@dataclass(slots=True)
class Said:
    """What one step, or several at once, say to one client.

    Attributes:
        rows: outputs of its running set, valid until the set's next change.
        packed: outputs that are msgpack already.
        outputs: those of the others.

    """

    rows: Sequence[Rows] = ()
    packed: list[bytes] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)


@dataclass(slots=True)
class Spoken:
    """What was said in one step, or in several at once.

    Attributes:
        said: by client; rows are valid until `Speakers.regroup`.
        tokens: of all requests together.
        finished: requests that have said their last, and why that was it; they are gone.
        first_client: whose request said something first, which gets the statistics; None is whichever is told first.
        is_reported: whether the frontend hears of the step although nothing was said.

    """

    said: dict[int, Said] = field(default_factory=dict)
    tokens: int = 0
    finished: list[tuple[Request, FinishReason]] = field(default_factory=list)
    first_client: int | None = None
    is_reported: bool = False

    def add(self, other: "Spoken") -> None:
        """Add what was said at the same time, of which nothing is rows."""
        for client, what in other.said.items():
            said = self.said.setdefault(client, Said())
            said.packed += what.packed
            said.outputs += what.outputs
        self.tokens += other.tokens
        self.finished += other.finished

    def tell(self, request: Request, event: EngineCoreEvent) -> None:
        """Have the last output of a request that has finished tell an event."""
        outputs = self.said[request.client].outputs
        for place, output in enumerate(outputs):
            if output.request_id == request.request_id:
                outputs[place] = replace(output, events=(*output.events, event))
