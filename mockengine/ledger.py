# SPDX-License-Identifier: Apache-2.0
"""Which requests are in flight, in a file that outlives a process that is killed.

The file is mapped into memory, so that a request costs no system call: the kernel keeps what was written when the
process dies. Each request has a slot; one is free when its first byte is 0.
"""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, Self

_SLOT_BYTES: Final = 256
_FIRST_SLOTS: Final = 1_024
# In use, length of the id, rank, client.
_HEAD: Final = Struct("<BBHH")
_USED: Final = 1
_MOST_ID_BYTES: Final = _SLOT_BYTES - _HEAD.size


@dataclass(frozen=True, slots=True)
class LostRequest:
    """A request that was in flight when its engine was killed.

    Attributes:
        request_id: the frontend's.
        engine: rank that served it.
        client: index of the API server that asked.

    """

    request_id: str
    engine: int
    client: int


class Ledger:
    """The requests in flight of one engine.

    Requests whose id has more than 250 bytes are not kept.
    """

    def __init__(self, path: Path) -> None:
        """Go on with what is there; raises `OSError`."""
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._lost = _requests_in(self._file.read())
        self._file.truncate(0)
        self._slots = 0
        self._map = self._allocate(_FIRST_SLOTS)
        self._free = list(range(_FIRST_SLOTS))
        self._by_id: dict[str, int] = {}
        self._ended: list[int] = []
        # Should this engine be killed before their clients are told, the next one has to.
        for each in self._lost:
            self.started(each.request_id, each.engine, each.client)

    @classmethod
    def beside(cls, state_file: str) -> Self:
        """Return the ledger that belongs to a state file; raises `OSError`."""
        path = Path(state_file).resolve()
        return cls(path.with_name(f"{path.name}.requests"))

    def started(self, request_id: str, engine: int, client: int) -> None:
        """Keep a request."""
        said = request_id.encode("utf-8", "replace")
        if len(said) > _MOST_ID_BYTES or request_id in self._by_id:
            return
        if not self._free and not self._grow():
            return
        slot = self._by_id[request_id] = self._free.pop()
        start = slot * _SLOT_BYTES
        body = start + _HEAD.size
        self._map[body : body + len(said)] = said
        # What makes it count comes last.
        _HEAD.pack_into(self._map, start, _USED, len(said), engine, client)

    def finished(self, request_id: str) -> None:
        """Keep a request no longer, once what ends it has been sent."""
        slot = self._by_id.pop(request_id, None)
        if slot is not None:
            self._ended.append(slot)

    def turned(self) -> None:
        """Take note that whatever was to be said has been sent."""
        if self._ended:
            for slot in self._ended:
                self._map[slot * _SLOT_BYTES] = 0
            self._free += self._ended
            self._ended.clear()

    def take_lost(self) -> list[LostRequest]:
        """Return the requests of the engine before this one, which are kept until the next turn."""
        lost, self._lost = self._lost, []
        for each in lost:
            self.finished(each.request_id)
        return lost

    def close(self) -> None:
        """Leave the file to the next engine."""
        self._map.close()
        self._file.close()

    def _grow(self) -> bool:
        slots = 2 * self._slots
        try:
            grown = self._allocate(slots)
        except OSError:
            # What there is no room for is not kept.
            return False
        self._map.close()
        self._free += range(slots // 2, slots)
        self._map = grown
        return True

    def _allocate(self, slots: int) -> mmap.mmap:
        """Return the file with room for so many; raises `OSError` where the disk has none: later it is a signal."""
        os.posix_fallocate(self._file.fileno(), 0, slots * _SLOT_BYTES)
        mapped = mmap.mmap(self._file.fileno(), slots * _SLOT_BYTES)
        self._slots = slots
        return mapped


def _requests_in(data: bytes) -> list[LostRequest]:
    """Return what the slots hold; bytes that nobody wrote hold nothing."""
    found = []
    for start in range(0, len(data) - _SLOT_BYTES + 1, _SLOT_BYTES):
        used, length, engine, client = _HEAD.unpack_from(data, start)
        if used == _USED and 0 < length <= _MOST_ID_BYTES:
            said = data[start + _HEAD.size : start + _HEAD.size + length]
            with suppress(UnicodeDecodeError):
                found.append(LostRequest(said.decode(), engine, client))
    return found
