# SPDX-License-Identifier: Apache-2.0
"""The sockets of a frontend, bound (protocol section 1.1). Knows no message but INIT's addresses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import zmq

from mockengine.wire.handshake import Init

Socket = zmq.Socket[bytes]

_SMALL_BUFFER_BYTES: Final = 4_096


class FrontendSockets:
    """Everything that engines connect to.

    Attributes:
        handshake: ROUTER for HELLO and READY.
        handshake_address: where it is bound.
        inputs: ROUTER of each client, for what it asks.
        outputs: PULL of each client, for what it hears.
        from_ranks: PULL of the coordinator, if there is one.
        to_ranks: XPUB of the coordinator, likewise.
        init: all their addresses, as engines are told them.

    """

    def __init__(
        self,
        *,
        clients: int,
        coordinator: bool,
        ipc_directory: Path | None,
        handshake_address: str | None,
        parallel_config: Mapping[str, object],
        reads_ahead: bool,
    ) -> None:
        """Bind them, to the given address for the handshake; the arguments are those of the double."""
        self._context = zmq.Context()
        self._ipc_directory = ipc_directory
        self.handshake = self._socket(zmq.ROUTER)
        if handshake_address is not None:
            self.handshake.bind(handshake_address)
        self.handshake_address = handshake_address or self._bind(self.handshake, "handshake")
        self.inputs = [self._socket(zmq.ROUTER) for _ in range(clients)]
        self.outputs = [self._socket(zmq.PULL) for _ in range(clients)]
        if not reads_ahead:
            for socket in self.outputs:
                socket.set_hwm(1)
                socket.setsockopt(zmq.RCVBUF, _SMALL_BUFFER_BYTES)
        self.from_ranks = self._socket(zmq.PULL) if coordinator else None
        self.to_ranks = self._socket(zmq.XPUB) if coordinator else None
        if self.to_ranks is not None:
            # Each rank's subscription counts, though they are all equal.
            self.to_ranks.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.init = Init(
            inputs=tuple(self._bind(socket, f"input{index}") for index, socket in enumerate(self.inputs)),
            outputs=tuple(self._bind(socket, f"output{index}") for index, socket in enumerate(self.outputs)),
            coordinator_input=None if self.to_ranks is None else self._bind(self.to_ranks, "coordinator_out"),
            coordinator_output=None if self.from_ranks is None else self._bind(self.from_ranks, "coordinator_in"),
            parallel_config=parallel_config,
        )

    def close(self) -> None:
        """Close every socket, whatever it still holds."""
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)
        return socket

    def _bind(self, socket: Socket, name: str) -> str:
        if self._ipc_directory is not None:
            address = f"ipc://{self._ipc_directory / name}"
            socket.bind(address)
            return address
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def receive(socket: Socket, deadline_s: float, awaited: str) -> list[bytes]:
    """Return the next message's frames; raises `TimeoutError`, naming what was awaited, when none comes in time."""
    if not socket.poll(round(1_000 * deadline_s)):
        raise TimeoutError(f"{awaited} did not come within {deadline_s:g} s")
    return socket.recv_multipart()
