# SPDX-License-Identifier: Apache-2.0
"""Messages of an engine that are made wrong on their way out (protocol sections 0 and 4).

What is to be said is encoded as always, and decoded, changed and encoded again here. So nothing that makes right
messages knows of wrong ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

from mockengine.wire.codec import pack, unpack_plainly
from mockengine.wire.lines import Line

OUTPUTS: Final = 1
STATS: Final = 2
TIMESTAMP: Final = 3
UTILITY: Final = 4
FINISHED: Final = 5
WAVES: Final = (6, 7)


class SaidEnvelope:
    """One message of an engine, as items that may be changed.

    Attributes:
        items: of the array, as many as are said.
        line: the frontend's.
        is_changed: whether anything has been.
        replacement: what is said instead of the array, if it is none any more.
        besides: messages that follow this one.

    """

    def __init__(self, frames: Sequence[bytes], line: Line) -> None:
        """Decode what an engine is about to say."""
        payload, *self._aux_frames = map(bytes, frames)
        self.items: list[Any] = unpack_plainly(payload)
        self.line = line
        self.is_changed = False
        self.replacement: bytes | None = None
        self.besides: list[list[bytes]] = []

    @property
    def outputs(self) -> list[Any]:
        """What is said of requests, an array for each."""
        return self.items[OUTPUTS] if len(self.items) > OUTPUTS else []

    def output(self, request_id: str) -> list[Any] | None:
        """Return what is said of one request, if anything is."""
        return next((output for output in self.outputs if output[0] == request_id), None)

    def item(self, position: int) -> Any:
        """Return an item, nil where the array ends before."""
        return self.items[position] if len(self.items) > position else None

    def put(self, position: int, value: object) -> None:
        """Set an item, with nil in what is missing before it."""
        self.items += [None] * (position + 1 - len(self.items))
        self.items[position] = value
        self.is_changed = True

    def field(self, output: Sequence[Any], name: str) -> Any:
        """Return a field of an output, None where it is not said."""
        position = self.line.output_positions.get(name)
        return None if position is None or position >= len(output) else output[position]

    def ends(self, request_id: str) -> bool:
        """Whether a request has its last output here."""
        output = self.output(request_id)
        return output is not None and self.field(output, "finish_reason") is not None

    def add_message(self, outputs: Sequence[Any]) -> None:
        """Let another message follow, of these outputs."""
        self.besides.append([pack([self.items[0], list(outputs), None, self.items[TIMESTAMP]])])
        self.is_changed = True

    def messages(self) -> Iterator[list[bytes]]:
        """Yield the messages that are said, without one that would say nothing at all."""
        says_something = self.outputs or any(self.item(each) is not None for each in (STATS, UTILITY, FINISHED, *WAVES))
        if self.replacement is not None:
            yield [self.replacement, *self._aux_frames]
        elif says_something:
            yield [pack(self.items), *self._aux_frames]
        yield from self.besides


class Edit(ABC):
    """Makes messages of one rank wrong, until it is done.

    Attributes:
        is_done: whether there is nothing left to do.

    """

    def __init__(self) -> None:
        self.is_done = False

    @abstractmethod
    def apply(self, envelope: SaidEnvelope) -> None:
        """Change a message that is about to leave, or leave it as it is."""


class RequestEdit(Edit):
    """Makes messages about one request wrong."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


class CallEdit(Edit):
    """Makes the answer to one utility call wrong."""

    def __init__(self, call_id: int) -> None:
        super().__init__()
        self._call_id = call_id

    def apply(self, envelope: SaidEnvelope) -> None:
        """Change the answer, when it comes."""
        reply = envelope.item(UTILITY)
        if reply is not None and reply[0] == self._call_id:
            self.answer(envelope, reply)
            envelope.is_changed = True
            self.is_done = True

    @abstractmethod
    def answer(self, envelope: SaidEnvelope, reply: list[Any]) -> None:
        """Change the answer `[call_id, failure, result]`."""
