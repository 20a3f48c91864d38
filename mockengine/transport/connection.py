# SPDX-License-Identifier: Apache-2.0
"""The sending end of one PUSH connection, made anew whenever it breaks.

This end speaks ZMTP itself instead of leaving it to libzmq, because steps are what the engine does most. Many messages
leave with one system call and without waking up another thread, and what waits is known to the byte.
"""

import errno
import fcntl
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from mockengine.transport.sockets import set_up_tcp
from mockengine.transport.zmtp import GREETING, READY, Peer, ZmtpError
from mockengine.wire.batch import Buffer
from mockengine.wire.values import shown

_Address: TypeAlias = tuple[int, Any]
# A path, or host, port and family.
_Target: TypeAlias = str | tuple[str, int, int]

_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 0.25
# libzmq's own limit for a peer to say who it is.
_HANDSHAKE_S: Final = 30.0
# What one system call takes (IOV_MAX is 1024).
_MOST_BUFFERS: Final = 1_000
_RECEIVED_BYTES: Final = 4_096
# Answers to heartbeats that wait for a peer that does not read; one would do.
_MOST_OWED_BYTES: Final = 1_024
# A peer that says more than that to one that only sends must live with the end.
_MOST_HUSHED: Final = 64
_HIGHEST_PORT: Final = 65_535
# In bytes; the kernel's own limit.
_LONGEST_PATH: Final = 107


class AddressError(ValueError):
    """An address that nothing can be sent to; the text says why."""


class Connection:
    """A connection to one address, which takes bytes while it stands.

    Attributes:
        deadline: when `advance` is to be called although nothing has happened, in seconds of the monotonic clock.
        refusal: why the last peer that could not be spoken to was none, if there was one.

    """

    def __init__(self, address: str, on_drop: Callable[[], None]) -> None:
        """Connect to nothing yet.

        Args:
            address: `tcp://host:port` or `ipc://path`.
            on_drop: called just before a connection ends, as long as its descriptor is valid.

        Raises:
            AddressError: it is neither of these.

        """
        self.deadline: float | None = None
        self.refusal: str | None = None
        self._address = address
        self._target = _target(address)
        self._on_drop = on_drop
        self._socket: socket.socket | None = None
        self._peer: Peer | None = None
        # What the peer must hear between two messages.
        self._owed = b""
        self._retry_s = _FIRST_RETRY_S
        self._addresses: deque[_Address] = deque()

    @property
    def is_open(self) -> bool:
        """Whether the peer takes messages."""
        return self._peer is not None and self._peer.is_ready

    @property
    def minor_version(self) -> int | None:
        """The minor version of ZMTP 3 that the peer speaks, once it has said so."""
        return None if self._peer is None else self._peer.minor_version

    @property
    def fileno(self) -> int | None:
        """The descriptor to poll, if there is one: for what the peer says, and what `awaits_writing` tells."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def awaits_writing(self) -> bool:
        """Whether something waits for the kernel to take it, besides messages."""
        # Until the peer is ready nothing is said but who this is, and that needs no waiting.
        return self._peer is None or (self._peer.is_ready and bool(self._owed))

    @property
    def has_left(self) -> bool:
        """Whether the peer's machine has everything that was written, as far as this side can know."""
        return self._socket is None or _unacknowledged_bytes(self._socket) == 0

    def advance(self, now: float) -> None:
        """Do what has become possible; call it at first, when the poller says so, and at `deadline`.

        Args:
            now: the time, in seconds of the monotonic clock.

        """
        if self._socket is None:
            if self.deadline is None or now >= self.deadline:
                self._connect(now)
        elif self.deadline is not None and now >= self.deadline:
            self._lose(now)
        elif self._peer is None:
            self._greet(now)
        else:
            self._listen(now)

    def write(self, buffers: Sequence[Buffer]) -> int:
        """Hand over as much as the kernel takes at once; return how many bytes these were."""
        written = 0
        for first in range(0, len(buffers), _MOST_BUFFERS):
            part = buffers[first : first + _MOST_BUFFERS]
            try:
                taken = self._socket.sendmsg(part) if self._socket is not None else 0
            except OSError:
                # It takes no more for now; or the peer is gone, as the poller tells.
                break
            written += taken
            if taken < sum(map(len, part)):
                break
        return written

    def pay(self) -> bool:
        """Say, between two messages, what the peer must hear; tell whether that was all."""
        if self._owed:
            self._owed = self._owed[self.write([self._owed]) :]
        return not self._owed

    def interrupt(self, until: float) -> None:
        """End it, and connect again when it is time, as the engine does after a loss."""
        self._drop()
        self.deadline = until

    def close(self) -> None:
        """End it for good; what the kernel has goes on leaving."""
        if self._socket is not None:
            _hush(self._socket)
        self._drop()
        self.deadline = None

    def _connect(self, now: float) -> None:
        self.deadline = now + _HANDSHAKE_S
        try:
            family, address = self._next_address()
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.settimeout(0)
            if family != socket.AF_UNIX:
                set_up_tcp(self._socket)
            error = self._socket.connect_ex(address)
        except OSError:
            self._lose(now)
            return
        if not error:
            self._greet(now)
        elif error != errno.EINPROGRESS:
            self._lose(now)

    def _next_address(self) -> _Address:
        """Return where to try next: the addresses of the target in turn, looked up anew when all have been tried."""
        if isinstance(self._target, str):
            return socket.AF_UNIX, self._target
        if not self._addresses:
            host, port, family = self._target
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            self._addresses += [(family, address) for family, _, _, _, address in found]
        return self._addresses.popleft()

    def _greet(self, now: float) -> None:
        """Say who this is, if the connection stands by now."""
        if self._socket is None:
            return
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._lose(now)
            return
        with suppress(OSError):
            self._socket.getpeername()
            self._peer = Peer()
            # A new connection takes so few bytes at once.
            self.write([GREETING])

    def _listen(self, now: float) -> None:
        """Take in what the peer says: who it is, perhaps heartbeats, and that it is gone."""
        if self._socket is None or self._peer is None:
            return
        try:
            said = self._socket.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        try:
            answers = self._peer.hear(said)
        except ZmtpError as error:
            self.refusal = f"{self._address}: {error}"
            said = b""
        if not said:
            self._lose(now)
            return
        for answer in answers:
            if answer is READY:
                self.write([answer])
            elif len(self._owed) < _MOST_OWED_BYTES:
                self._owed += answer
        if self._peer.is_ready:
            self.deadline = None
            self._retry_s = _FIRST_RETRY_S

    def _lose(self, now: float) -> None:
        """Give up this connection and try again a little later."""
        self._drop()
        self.deadline = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

    def _drop(self) -> None:
        self._on_drop()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._peer = None
        self._owed = b""


def _target(address: str) -> _Target:
    """Return the path, or the host, port and family, of an address as a frontend gives it."""
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "ipc" and 0 < len(rest.encode()) <= _LONGEST_PATH:
        # As in libzmq, @ stands for the NUL of an abstract name.
        return "\0" + rest[1:] if rest[0] == "@" else rest
    host, colon, port = rest.rpartition(":")
    is_port = colon and port.isdecimal() and 0 < int(port) <= _HIGHEST_PORT
    if scheme != "tcp" or not is_port or not _can_be_looked_up(host):
        forms = f"tcp://host:port nor ipc://path, of {_LONGEST_PATH} bytes at most"
        raise AddressError(f"{shown(address)} is neither {forms}")
    if host[0] == "[" and host[-1] == "]":
        return host[1:-1], int(port), socket.AF_UNSPEC
    return host, int(port), socket.AF_INET


def _can_be_looked_up(host: str) -> bool:
    """Tell whether a name is one that may be asked for: no empty labels, none that are too long."""
    try:
        return host.encode("idna") not in (b"", b"*")
    except UnicodeError:
        return False


def _unacknowledged_bytes(connection: socket.socket) -> int:
    """Return how many bytes the peer's machine does not have yet."""
    with suppress(OSError):
        return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0


def _hush(connection: socket.socket) -> None:
    """Read what has not been read, because the kernel would drop what still leaves when that is closed upon."""
    with suppress(OSError):
        for _ in range(_MOST_HUSHED):
            if not connection.recv(_RECEIVED_BYTES):
                return
