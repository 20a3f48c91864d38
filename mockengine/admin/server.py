# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the admin port: uvicorn, quiet and asleep while nobody asks."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mockengine.admin.app import make_app
from mockengine.admin.view import View
from mockengine.remote import Remote

# Seconds that a client has for its first request.
_PATIENCE_S: Final = 5.0
# Each takes a descriptor, of which the frontend's sockets must find enough.
_MOST_CONNECTIONS: Final = 256


class Server:
    """Runs in one thread, and may be ended from another."""

    def __init__(self, view: View, remote: Remote, complain: Callable[[str, BaseException | None], None]) -> None:
        _send_errors_to(complain)
        config = uvicorn.Config(
            make_app(view, remote),
            loop="asyncio",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _SleepingServer(config)

    def serve_on(self, listener: socket.socket) -> None:
        """Serve until `end` is called."""
        self._server.run(sockets=[listener])

    def end(self) -> None:
        """Stop serving, from any thread."""
        self._server.end()


class _Protocol(H11Protocol):
    """HTTP for probes: a client that does not ask soon is not waited for, nor are more than a probe can need."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn itself
        """Take a connection, for a while."""
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.close()
        self._impatience = self.loop.call_later(_PATIENCE_S, self._close_if_nothing_is_asked)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._impatience.cancel()
        super().connection_lost(exc)

    def _close_if_nothing_is_asked(self) -> None:
        # None before the first request, whatever its annotation says. For the next one uvicorn waits as long by itself.
        cycle: Any = self.cycle
        if cycle is None:
            self.transport.close()


class _SleepingServer(uvicorn.Server):
    """A server that does not look ten times a second whether it should end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Sleep until the end."""
        self._loop = asyncio.get_running_loop()
        # It may have been called for before there was a loop to wake.
        if not self.should_exit:
            await self._ended.wait()

    def end(self) -> None:
        """Stop serving, from any thread."""
        self.should_exit = True
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._ended.set)


class _Bridge(logging.Handler):
    def __init__(self, complain: Callable[[str, BaseException | None], None]) -> None:
        super().__init__(logging.ERROR)
        self._complain = complain

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on."""
        error = record.exc_info[1] if record.exc_info else None
        self._complain(record.getMessage(), error)


def _send_errors_to(complain: Callable[[str, BaseException | None], None]) -> None:
    """Let errors reach the engine's log; what clients do wrong is theirs to know."""
    for name in ("uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [_Bridge(complain)]
        logger.propagate = False
