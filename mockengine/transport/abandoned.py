# SPDX-License-Identifier: Apache-2.0
"""Tells a frontend whose engine was killed that its requests are lost.

Such a frontend does not notice (protocol section 10): it answers 200 on /health while every request hangs, and it
takes no other engine. What it listens to is its output sockets, on which anybody may say that the engine is dead.
"""

import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

import zmq

from mockengine.transport.sockets import Context, PeerMonitor, Socket, make_socket
from mockengine.transport.stop import StopSignal

# A frontend that is still there is reached within this time.
_PATIENCE_S: Final = 1.0
# Both addresses are tried at once; the handshake's answer may come this much later than the outputs'.
_AFTERTHOUGHT_S: Final = 0.05
_LINGER_MS: Final = 1_000


class Outcome(Enum):
    """What became of the frontend that the engine before this one served."""

    TOLD = auto()
    GONE = auto()
    REPLACED = auto()


def tell_abandoned(
    context: Context,
    outputs: Sequence[str],
    handshake_address: str,
    notice: Sequence[bytes],
    stop: StopSignal,
) -> Outcome:
    """Say `notice` to the frontend that listens at `outputs`, if it is still there and no other one is starting.

    A frontend keeps its handshake address open only while it starts, so one that waits there is the next one, and is
    not to be told anything.

    Args:
        context: the process's context.
        outputs: the addresses that the frontend gave to the engine before this one.
        handshake_address: where frontends are joined.
        notice: the frames to send to every API server.
        stop: the wish to stop, which cuts this short.

    """
    sockets = [make_socket(context, zmq.PUSH, address) for address in outputs]
    probe = make_socket(context, zmq.DEALER, handshake_address)
    monitors = [PeerMonitor(socket) for socket in (probe, *sockets)]
    try:
        for socket, address in zip((probe, *sockets), (handshake_address, *outputs), strict=True):
            socket.connect(address)
        outcome = _look(monitors[0], monitors[1:], stop)
    except zmq.ZMQError:
        # An address that cannot be connected to, for instance because the file that named it was damaged.
        outcome = Outcome.GONE
    if outcome is Outcome.TOLD:
        for socket in sockets:
            socket.send_multipart(notice)
    _close([probe, *sockets], monitors, _LINGER_MS if outcome is Outcome.TOLD else 0)
    return outcome


def _look(probe: PeerMonitor, outputs: Sequence[PeerMonitor], stop: StopSignal) -> Outcome:
    end = time.monotonic() + _PATIENCE_S
    poller = zmq.Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    for monitor in (probe, *outputs):
        poller.register(monitor.events, zmq.POLLIN)
    is_there = False
    while not stop.requested:
        if probe.connected:
            return Outcome.REPLACED
        if not is_there and all(monitor.connected for monitor in outputs):
            is_there = True
            end = min(end, time.monotonic() + _AFTERTHOUGHT_S)
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        if stop.fileno() in dict(poller.poll(max(1, round(1_000 * left_s)))):
            stop.clear_wakeup()
        for monitor in (probe, *outputs):
            monitor.read()
    return Outcome.TOLD if is_there else Outcome.GONE


def _close(sockets: Sequence[Socket], monitors: Sequence[PeerMonitor], linger_ms: int) -> None:
    for monitor in monitors:
        monitor.close()
    for socket in sockets:
        socket.close(linger_ms)
