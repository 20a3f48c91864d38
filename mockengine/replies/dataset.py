# SPDX-License-Identifier: Apache-2.0
"""Replies out of a data set: those that it has for a prompt, or one after the other.

The file is read once, at the start. What is kept of it is what may be said, as bytes one behind the other, and eight
bytes for each prompt.
"""

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final
from unicodedata import normalize

import numpy as np

from mockengine.replies.asked import Asked
from mockengine.replies.chat_forms import UserMessage
from mockengine.replies.hashing import uniform
from mockengine.replies.json_records import RecordsError, records
from mockengine.replies.records import Recorded, recorded
from mockengine.replies.wish import ToolCall, Wish

_HASH_BYTES: Final = 8
_MOST_PROBLEMS: Final = 20
_HOW: Final = "give JSON Lines, or one list of records"
_SPACE: Final = re.compile(r"\s+")
# What is drawn from a reply's key for this is independent of all else that is.
_STREAM: Final = 0x64617461
# How a reply is kept: its text alone, or all of it.
_TEXT: Final = b"t"
_ALL: Final = b"a"


class DatasetError(Exception):
    """A data set that cannot be used; the text has a line for each reason, with file and line."""


class Lookup(StrEnum):
    """Which reply a request gets."""

    PROMPT = "prompt"
    IN_ORDER = "in_order"


class Dataset:
    """Wants what a data set has."""

    def __init__(self, path: Path, lookup: Lookup) -> None:
        """Read the data set.

        Raises:
            DatasetError: it cannot be used.

        """
        self._lookup = lookup
        self._said = bytearray()
        self._starts = array("Q")
        self._next = 0
        hashes = self._read(path)
        self._starts.append(len(self._said))
        # Stable, so that replies to one prompt are in the order of the file.
        self._order = np.argsort(np.array(hashes, np.uint64), kind="stable")
        self._hashes = np.array(hashes, np.uint64)[self._order]

    def __len__(self) -> int:
        """Return how many replies there are."""
        return len(self._starts) - 1

    def wish_for(self, asked: Asked) -> Wish | None:
        """Return the reply to a request, or None where there is none for its prompt."""
        if self._lookup is Lookup.IN_ORDER:
            self._next += 1
            return self._wish((self._next - 1) % len(self))
        if asked.last_message is None:
            return None
        wanted = np.uint64(_hash(asked.last_message))
        first, end = (int(np.searchsorted(self._hashes, wanted, side)) for side in ("left", "right"))
        if first == end:
            return None
        place = first + int(uniform(asked.key ^ _STREAM) * (end - first))
        return self._wish(int(self._order[min(place, end - 1)]))

    def _read(self, path: Path) -> "array[int]":
        """Keep what a file has; return the hashes of its prompts."""
        hashes = array("Q")
        problems = _Problems(path)
        try:
            if not S_ISREG(path.stat().st_mode):
                raise DatasetError(f"{path}: it is no regular file ({_HOW})")
            for line, record in records(path):
                try:
                    if isinstance(record, ValueError):
                        raise record
                    for reply in recorded(record):
                        hashes.append(_hash(reply.asked))
                        self._keep(reply)
                except ValueError as error:
                    problems.note(line, error)
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror} ({_HOW})") from None
        except RecordsError as error:
            problems.note(error.line, error)
        problems.raise_any()
        if not hashes:
            raise DatasetError(f"{path}: there are no replies in it ({_HOW})")
        return hashes

    def _keep(self, reply: Recorded) -> None:
        wish = reply.wish
        self._starts.append(len(self._said))
        if wish == Wish(text=wish.text):
            self._said += _TEXT + (wish.text or "").encode()
        else:
            given = {name: value for name, value in asdict(wish).items() if value is not None}
            self._said += _ALL + json.dumps(given).encode()

    def _wish(self, place: int) -> Wish:
        kept = bytes(self._said[self._starts[place] : self._starts[place + 1]])
        if kept.startswith(_TEXT):
            return Wish(text=kept[1:].decode())
        given: Mapping[str, Any] = json.loads(kept[1:])
        calls = [ToolCall(**call) for call in given.get("tool_calls", ())]
        return Wish(**{**given, "tool_calls": calls or None})


def _hash(message: UserMessage) -> int:
    """Return what stands for a message, however its white space and its accents have come through a chat template."""
    text = _SPACE.sub("", normalize("NFC", message.text))
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=_HASH_BYTES)
    digest.update(b"\0%d" % message.tool_rounds)
    return int.from_bytes(digest.digest(), "little")


class _Problems:
    """What is wrong with a file: some of it, and how much there is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._some: list[str] = []
        self._count = 0

    def note(self, line: int, reason: Exception) -> None:
        self._count += 1
        if self._count <= _MOST_PROBLEMS:
            self._some.append(f"{self._path}:{line}: {reason}")

    def raise_any(self) -> None:
        """Raise `DatasetError` if there is any."""
        if self._count:
            count = "a problem" if self._count == 1 else f"{self._count} problems"
            more = [f"and {self._count - _MOST_PROBLEMS} more"] if self._count > _MOST_PROBLEMS else []
            raise DatasetError("\n  ".join([f"the file has {count} ({_HOW}):", *self._some, *more]))
