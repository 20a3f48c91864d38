# SPDX-License-Identifier: Apache-2.0
"""Publishes KV-cache events as an engine of vLLM does, and repeats what a subscriber missed (protocol section 9).

Publishing is one send of a PUB socket in the engine's thread. Such a send never waits: libzmq queues the message for
each subscriber, drops it for one whose queue is full, and does the network's part in a thread of its own.

Replays have a thread of their own, which sleeps until a request comes. Ten thousand batches take tenths of a second
to send; in the loop, that would be late steps, or a replay cut into slices that the loop has to keep. The two threads
share the recent batches behind a lock, and Python's own lock: a replay rests after every short burst, for long enough
that a step which has become due can begin. Steps of 2 ms were as late beside such replays as without; beside replays
without rests, their 99th percentile was three times as late.

This module knows nothing of what events mean or when they happen.
"""

import socket as kernel
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

import zmq

from mockengine.transport.sockets import Context, Socket, make_socket
from mockengine.wire.kv_events import (
    REPLAY_END,
    EventForm,
    KVCacheEvent,
    KVEventBatch,
    event_message,
    write_event_batch,
)

_MOST_PORT: Final = 65_535
_ANY_PORT_OF_THIS_NODE: Final = "tcp://*:0"
# Addresses that are for examples only: routed like any other, and nothing is sent there.
_ELSEWHERE: Final = ((kernel.AF_INET, "192.0.2.1"), (kernel.AF_INET6, "2001:db8::1"))
_DISCARD_PORT: Final = 9
# A subscriber that is not up yet is looked for at growing intervals, up to this one.
_MOST_RECONNECT_MS: Final = 1_000
_UNBIND_MS: Final = 1_000
# Identity, delimiter and sequence.
_REQUEST_FRAMES: Final = 3
# A request is 8 bytes; whoever sends more than this is disconnected instead of stored.
_MOST_REQUEST_BYTES: Final = 65_536
# How long a replay keeps Python's lock at most, give or take one message, and for how long it then leaves it alone.
_BURST_S: Final = 0.000_2
_REST_S: Final = 0.000_5


class KvEventsError(Exception):
    """An address that cannot be used for KV-cache events; the text names it and says why."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"KV events: {address}: {reason}")


@dataclass(frozen=True, slots=True)
class KvEventsPlan:
    """How the ranks of a process publish; names and defaults are vLLM's.

    Attributes:
        endpoint: where rank 0 publishes; rank r adds r to the port.
        replay_endpoint: where rank 0 answers replay requests; None is nowhere.
        topic: what subscribers choose by; may be empty.
        buffer_steps: how many batches can be replayed.
        hwm: how many batches may wait for one subscriber before it misses some; 0 is any number.
        max_queue_size: only said, in `config`: batches wait nowhere else than for subscribers.
        form: of the events.
        host: what `tcp://*:0` binds, an IP address; None is the one by which this machine reaches others.

    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    form: EventForm = EventForm.MAP
    host: str | None = None


def _ignore(_reason: str) -> None:
    """Hear of nothing."""


class KvPublisher:
    """What one rank tells of its cache.

    Attributes:
        endpoint: where it publishes, with the real port.
        replay_endpoint: where it answers replay requests, likewise, or None.

    """

    def __init__(
        self, context: Context, plan: KvEventsPlan, rank: int, on_refused: Callable[[str], None] = _ignore
    ) -> None:
        """Open the sockets, and begin to answer replay requests.

        Args:
            context: where the sockets live. It should not be the one of the frontend's sockets: libzmq looks host names
                up in the context's network thread, so a subscriber's name that takes long to look up would delay
                requests.
            plan: how to publish.
            rank: the engine index, which is also said in each batch.
            on_refused: called in the thread of the replays with the reason why a request got no answer or no whole one;
                must not raise.

        Raises:
            KvEventsError: an address cannot be bound or connected to.

        """
        self._plan = plan
        self._rank = rank
        self._next_sequence = 0
        self._replays: _Replays | None = None
        self._outlet = _open_outlet(context, plan, rank)
        self.endpoint = self._outlet.endpoint
        self.replay_endpoint: str | None = None
        if plan.replay_endpoint is not None:
            try:
                self._replays = _Replays(context, plan, rank_endpoint(plan.replay_endpoint, rank), on_refused)
            except BaseException:
                self._outlet.close(0)
                raise
            self.replay_endpoint = self._replays.endpoint

    def config(self) -> dict[str, object]:
        """Return the `kv_events_config` of the ready response."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self._plan.buffer_steps,
            "hwm": self._plan.hwm,
            "max_queue_size": self._plan.max_queue_size,
            "topic": self._plan.topic,
        }

    def publish(self, events: Sequence[KVCacheEvent], now_unix: float) -> None:
        """Publish what one step did to the cache; without events nothing is said. Never waits; from one thread alone.

        Args:
            events: in the order in which they happened.
            now_unix: the time, in unix seconds.

        """
        if not events:
            return
        payload = write_event_batch(KVEventBatch(now_unix, tuple(events), self._rank), self._plan.form)
        if self._replays is not None:
            # Before it is sent: whoever has heard of a batch finds it when it asks for a replay.
            self._replays.keep(self._next_sequence, payload)
        self._outlet.socket.send_multipart(event_message(self._plan.topic, self._next_sequence, payload), zmq.NOBLOCK)
        self._next_sequence += 1

    def close(self, linger_ms: int = 0) -> None:
        """Free ports and thread; batches on their way may go on leaving for `linger_ms` while the context ends."""
        if self._replays is not None:
            self._replays.close(linger_ms)
        self._outlet.close(linger_ms)


class _Replays:
    """Keeps the recent batches and sends them to whoever asks.

    The socket belongs to the thread from the thread's start to its end. It refuses to queue more for a peer than two
    replays: one that does not read costs no more memory than that, and one that does read always has room for a whole
    replay, although libzmq learns of what has left in steps of half a queue.
    """

    def __init__(self, context: Context, plan: KvEventsPlan, address: str, on_refused: Callable[[str], None]) -> None:
        self._topic = plan.topic
        # Numbers and payloads.
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=plan.buffer_steps)
        self._lock = threading.Lock()
        self._on_refused = on_refused
        socket = make_socket(context, zmq.ROUTER, address)
        socket.sndhwm = 2 * (plan.buffer_steps + 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        self._bound = _bind(socket, address, plan.host)
        self.endpoint = self._bound.endpoint
        self._is_closing = False
        self._rest_at = 0.0
        self._wakeup, self._alarm = kernel.socketpair()
        # A daemon: whoever forgets to close it must not hang at exit.
        self._thread = threading.Thread(target=self._run, name="kv-replays", daemon=True)
        self._thread.start()

    def keep(self, sequence: int, payload: bytes) -> None:
        """Remember a batch, and forget the oldest one if there is no room; from any thread."""
        with self._lock:
            self._recent.append((sequence, payload))

    def close(self, linger_ms: int) -> None:
        """End the thread, in the middle of a replay if need be, and free the port."""
        self._is_closing = True
        self._wakeup.close()
        self._thread.join()
        self._alarm.close()
        self._bound.close(linger_ms)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bound.socket, zmq.POLLIN)
        poller.register(self._alarm, zmq.POLLIN)
        # Whoever ends the context before it has closed this wants the thread to end as well.
        with suppress(zmq.ContextTerminated):
            while not self._is_closing:
                poller.poll()
                self._rest_if_due()
                self._serve_one()

    def _rest_if_due(self) -> None:
        """Leave Python's lock to the engine's thread after every short burst."""
        if time.monotonic() >= self._rest_at:
            time.sleep(_REST_S)
            self._rest_at = time.monotonic() + _BURST_S

    def _serve_one(self) -> None:
        """Answer one request, if there is one; as vLLM does, with any bytes as delimiter and as sequence."""
        try:
            frames = self._bound.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) != _REQUEST_FRAMES:
            self._on_refused(f"{len(frames) - 1} frames where an empty one and a sequence are expected")
            return
        try:
            self._answer(frames[0], int.from_bytes(frames[2], "big"))
        except zmq.Again:
            self._on_refused("whoever asked does not read the replays that it asked for")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._on_refused("whoever asked has gone before the end of the replay")

    def _answer(self, identity: bytes, start: int) -> None:
        """Send what there is from a sequence on, then the end; what is not kept any more is left out.

        Raises:
            zmq.ZMQError: `zmq.Again` if too much waits for the peer, EHOSTUNREACH if it has gone.

        """
        send = self._bound.socket.send_multipart
        for sequence, payload in self._since(start):
            if self._is_closing:
                return
            self._rest_if_due()
            send([identity, b"", *event_message(self._topic, sequence, payload)], zmq.NOBLOCK)
        send([identity, b"", *REPLAY_END], zmq.NOBLOCK)

    def _since(self, start: int) -> list[tuple[int, bytes]]:
        """Return what is kept from a sequence on."""
        with self._lock:
            passed = max(0, start - self._recent[0][0]) if self._recent else 0
            # In one go: the engine's thread waits for this lock.
            return list(islice(self._recent, min(passed, len(self._recent)), None))


# Addresses.


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Return the address of a rank: its port is that of rank 0 plus the rank, but for port 0, which is any.

    Raises:
        KvEventsError: no such port, or an address of which there cannot be several.

    """
    scheme, separator, rest = endpoint.partition("://")
    if scheme == "inproc" and separator:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    if scheme == "ipc" and separator:
        if rank:
            raise KvEventsError(endpoint, f"rank {rank} would have the address of rank 0 (use tcp://)")
        return endpoint
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not (host and colon and port.isascii() and port.isdigit()):
        raise KvEventsError(endpoint, "expected tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    number = int(port) + rank if int(port) else 0
    if number > _MOST_PORT:
        raise KvEventsError(endpoint, f"the port of rank {rank} would be {number}, the highest is {_MOST_PORT}")
    return f"tcp://{host}:{number}"


def is_bound(endpoint: str) -> bool:
    """Tell whether an engine binds this address to publish there; it connects to any other."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _node_address() -> str | None:
    """Return the IP address by which this machine reaches others."""
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), kernel.socket(family, kernel.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, _DISCARD_PORT))
            return str(probe.getsockname()[0])
    return None


# Sockets.


@dataclass(frozen=True, slots=True)
class _Opened:
    """A socket and where it is; `bound` is what libzmq calls that, if it is bound there to a listener of the kernel."""

    socket: Socket
    endpoint: str
    bound: str | None = None

    def close(self, linger_ms: int) -> None:
        """Close the socket; whoever binds the address after this succeeds."""
        if self.bound is not None:
            # A context that has ended has closed its listeners.
            with suppress(zmq.ZMQError):
                _unbind(self.socket, self.bound)
        self.socket.close(linger_ms)


def _open_outlet(context: Context, plan: KvEventsPlan, rank: int) -> _Opened:
    address = rank_endpoint(plan.endpoint, rank)
    outlet = make_socket(context, zmq.PUB, address)
    outlet.set_hwm(plan.hwm)
    if is_bound(address):
        return _bind(outlet, address, plan.host)
    if address.endswith(":0"):
        outlet.close()
        raise KvEventsError(
            address, f"there is no port 0 to connect to (use {_ANY_PORT_OF_THIS_NODE} for any free port)"
        )
    outlet.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
    try:
        outlet.connect(address)
    except (zmq.ZMQError, UnicodeError) as error:
        outlet.close()
        raise KvEventsError(address, f"cannot connect: {_reason(error)}") from error
    return _Opened(outlet, address)


def _bind(socket: Socket, address: str, host: str | None) -> _Opened:
    """Bind a socket, and learn its real port; it is closed if that fails."""
    try:
        if address == _ANY_PORT_OF_THIS_NODE:
            address = _of_this_node(host)
        if "[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(address)
    except (zmq.ZMQError, UnicodeError) as error:
        socket.close()
        raise KvEventsError(address, f"cannot bind: {_reason(error)}") from error
    except KvEventsError:
        socket.close()
        raise
    if address.startswith("inproc:"):
        return _Opened(socket, address)
    bound = socket.get_string(zmq.LAST_ENDPOINT)
    if address.startswith("ipc:"):
        return _Opened(socket, bound, bound)
    return _Opened(socket, f"{address.rpartition(':')[0]}:{bound.rpartition(':')[2]}", bound)


def _of_this_node(host: str | None) -> str:
    host = host or _node_address()
    if host is None:
        raise KvEventsError(_ANY_PORT_OF_THIS_NODE, "this machine has no address for others (use tcp://*:PORT)")
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


def _unbind(socket: Socket, bound: str) -> None:
    """Close a listener, and wait for the kernel to have it closed, which libzmq does in its own thread."""
    news = socket.get_monitor_socket(zmq.Event.CLOSED)
    try:
        socket.unbind(bound)
        news.poll(_UNBIND_MS)
    finally:
        socket.disable_monitor()
        news.close(0)


def _reason(error: zmq.ZMQError | UnicodeError) -> str:
    return zmq.strerror(error.errno) if isinstance(error, zmq.ZMQError) and error.errno else str(error)
