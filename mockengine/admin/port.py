# SPDX-License-Identifier: Apache-2.0
"""The admin port: a socket that listens from the start, and the thread that answers on it.

What the thread needs takes longer to import than a frontend takes to be joined. So it waits until the engine has
joined, or until it is clear that there is no frontend yet; who connects before that waits in the socket's queue.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from mockengine.admin.view import View
from mockengine.remote import Remote

if TYPE_CHECKING:
    from mockengine.admin.server import Server

_PACKAGES: Final = ("fastapi", "prometheus_client", "uvicorn")
# A frontend that is there is joined within this time.
_HEAD_START_S: Final = 0.25
_QUEUE: Final = 128
_SWITCH_S: Final = 0.000_2
# The end of the process waits no longer for answers that are under way.
_FAREWELL_S: Final = 0.3


class AdminPortError(Exception):
    """The admin port cannot be opened; the text says why and what to do."""


class AdminPort:
    """Answers over HTTP until it is closed.

    Attributes:
        port: where it listens.

    """

    def __init__(self, host: str, port: int) -> None:
        """Begin to listen.

        Raises:
            AdminPortError: packages are missing, or the address cannot be had.

        """
        missing = [name for name in _PACKAGES if find_spec(name) is None]
        if missing:
            raise AdminPortError(
                f"admin_port is {port}, but packages that it needs are missing: {', '.join(missing)} "
                "(install mockengine with its extra: pip install '.[admin]'; or set admin_port to 0)"
            )
        self.port = port
        self._socket = _listen(host, port)
        self._may_begin = threading.Event()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server: Server | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        view: View,
        remote: Remote,
        complain: Callable[[str, BaseException | None], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Answer from `view`, on a thread.

        Args:
            view: the engine.
            remote: changes it.
            complain: hears of a request that could not be answered because of a defect.
            fail: hears of an error that ended the thread.

        """
        self._thread = threading.Thread(
            target=self._work, args=(view, remote, complain, fail), name="admin", daemon=True
        )
        self._thread.start()

    def begin(self) -> None:
        """Let the thread begin without waiting longer: the engine has joined."""
        self._may_begin.set()

    def close(self) -> None:
        """Answer nobody any more."""
        with self._lock:
            self._closed.set()
            server = self._server
        self._may_begin.set()
        if server is not None:
            server.end()
        if self._thread is not None:
            self._thread.join(_FAREWELL_S)
        self._socket.close()

    def _work(
        self,
        view: View,
        remote: Remote,
        complain: Callable[[str, BaseException | None], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._may_begin.wait(_HEAD_START_S)
        # Whoever answers here keeps the engine's thread from its next step for as long as this, not for 5 ms.
        sys.setswitchinterval(_SWITCH_S)
        if self._closed.is_set():
            return
        try:
            from mockengine.admin.server import Server  # noqa: PLC0415 - see the top of this file

            server = Server(view, remote, complain)
            with self._lock:
                if self._closed.is_set():
                    return
                self._server = server
            server.serve_on(self._socket)
        except BaseException as error:  # noqa: BLE001 - there is never half an engine, whatever it was
            fail(error)
        else:
            if not self._closed.is_set():
                fail(RuntimeError("the admin port's server ended by itself"))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise AdminPortError(
            f"admin_host {host!r} is no address of this machine: {error.strerror} (use an address that it has, "
            "127.0.0.1 for itself alone, or 0.0.0.0 for all)"
        ) from error
    listener: socket.socket | None = None
    try:
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with suppress(OSError):
                # Where :: is all addresses, IPv4 belongs to them.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_QUEUE)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise AdminPortError(
            f"the admin port cannot listen at {host}, port {port}: {os.strerror(error.errno or 0)} "
            "(set admin_port to a port that is free, or to 0 for none; set admin_host to an address of this machine)"
        ) from error
    return listener
