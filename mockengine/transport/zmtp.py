# SPDX-License-Identifier: Apache-2.0
"""ZMTP as far as a PUSH socket needs it: greeting, the NULL mechanism, frames, heartbeats (ZeroMQ RFC 23 and 37).

Only bytes: `outbox` has the socket.
"""

from enum import Enum, auto
from functools import lru_cache
from typing import Final

import numpy as np

from mockengine.wire.batch import Buffer

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_NULL_MECHANISM: Final = b"NULL".ljust(20, b"\0")
_GREETING_BYTES: Final = 64
_OLDEST_MAJOR: Final = 3

_MORE: Final = 0x01
_LONG: Final = 0x02
_COMMAND: Final = 0x04
_SHORT_MOST: Final = 255
# A peer that only reads has no reason to say anything longer.
_LONGEST_FRAME: Final = 8_192
_PING_TTL_BYTES: Final = 2


class ZmtpError(Exception):
    """The peer speaks something else; the text says what was seen."""


@lru_cache(maxsize=256)
def frame_header(length: int, *, more: bool = False) -> bytes:
    """Return what goes before the bytes of one frame of a message; `more` says that another frame follows."""
    if length <= _SHORT_MOST:
        return bytes((_MORE if more else 0, length))
    return bytes((_LONG | (_MORE if more else 0),)) + length.to_bytes(8, "big")


def frame_all(bodies: Buffer, length: int) -> memoryview:
    """Return what goes over the wire for frames of that length, whose bodies lie one behind the other."""
    header = np.frombuffer(frame_header(length), np.uint8)
    framed = np.empty((len(bodies) // length, len(header) + length), np.uint8)
    framed[:, : len(header)] = header
    framed[:, len(header) :] = np.frombuffer(bodies, np.uint8).reshape(-1, length)
    return framed.reshape(-1).data


def _command(name: bytes, body: bytes) -> bytes:
    said = bytes((len(name),)) + name + body
    return bytes((_COMMAND, len(said))) + said


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


GREETING: Final = _SIGNATURE + b"\x03\x01" + _NULL_MECHANISM + b"\0" + bytes(31)
"""What either side says first: version 3.1, no encryption, not a server."""

READY: Final = _command(b"READY", _property(b"Socket-Type", b"PUSH") + _property(b"Identity", b""))
"""What is said once the peer's greeting has been read."""


class _Awaits(Enum):
    GREETING = auto()
    READY = auto()
    NOTHING = auto()


class Peer:
    """What the other side of one connection has said.

    Attributes:
        is_ready: whether it takes messages.
        minor_version: of ZMTP 3 that it speaks: libzmq, and so a Python frontend, 1; a Rust frontend 0.

    """

    def __init__(self) -> None:
        self.is_ready = False
        self.minor_version: int | None = None
        self._awaits = _Awaits.GREETING
        self._heard = bytearray()

    def hear(self, said: bytes) -> list[bytes]:
        """Take in what arrived; return what is to be answered, each piece between two messages.

        Raises:
            ZmtpError: it is no ZMTP 3 peer without encryption.

        """
        if not said:
            return []
        self._heard += said
        answers: list[bytes] = []
        if self._awaits is _Awaits.GREETING:
            if not self._take_greeting():
                return answers
            answers.append(READY)
        while (frame := self._take_frame()) is not None:
            answers += self._obey(*frame)
        return answers

    def _take_greeting(self) -> bool:
        heard = self._heard
        signature = heard[: len(_SIGNATURE)]
        if not signature.startswith(b"\xff") or (len(signature) == len(_SIGNATURE) and not signature[-1] & 1):
            raise ZmtpError(f"it does not speak ZMTP: it began with {bytes(heard[:16])!r}")
        if len(heard) < _GREETING_BYTES:
            return False
        if heard[10] < _OLDEST_MAJOR or heard[12:32] != _NULL_MECHANISM:
            mechanism = bytes(heard[12:32]).rstrip(b"\0")
            raise ZmtpError(f"it speaks ZMTP {heard[10]}.{heard[11]} with mechanism {mechanism!r}, not 3 with NULL")
        self.minor_version = heard[11]
        del heard[:_GREETING_BYTES]
        self._awaits = _Awaits.READY
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        """Remove and return the first frame, as its flags and its body, if it is complete."""
        heard = self._heard
        length_bytes = 8 if heard and heard[0] & _LONG else 1
        if len(heard) < 1 + length_bytes:
            return None
        length = int.from_bytes(heard[1 : 1 + length_bytes], "big")
        if length > _LONGEST_FRAME:
            raise ZmtpError(f"it says a frame of {length} bytes, which nobody asked for")
        end = 1 + length_bytes + length
        if len(heard) < end:
            return None
        flags, body = heard[0], bytes(heard[1 + length_bytes : end])
        del heard[:end]
        return flags, body

    def _obey(self, flags: int, body: bytes) -> list[bytes]:
        if not flags & _COMMAND:
            # A message, which a socket that only sends does not read.
            return []
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"ERROR":
            raise ZmtpError(f"it refused the connection: {rest[1:]!r}")
        if name == b"READY" and self._awaits is _Awaits.READY:
            self._awaits = _Awaits.NOTHING
            self.is_ready = True
        if name == b"PING":
            return [_command(b"PONG", rest[_PING_TTL_BYTES:])]
        return []
