# SPDX-License-Identifier: Apache-2.0
"""Broken messages on the sockets of a serving engine: each costs itself, the others are served, memory is bounded."""

import resource
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from mockengine.wire.messages import RequestType, write_message
from mockengine.wire.outputs import FinishReason
from mockengine.wire.requests import MAX_REQUEST_ID_BYTES, request_items

ADD, ABORT, START_DP_WAVE, UTILITY = (bytes([kind]) for kind in RequestType)
GOLDEN_ADD = msgpack.packb(
    request_items(
        {"request_id": "golden", "prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "stop": []}}, 22
    )
)
MB = 1_000_000

json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
mutated_add = st.builds(
    lambda position, change: GOLDEN_ADD[:position] + change + GOLDEN_ADD[position + len(change) :],
    st.integers(0, len(GOLDEN_ADD) - 1),
    st.binary(max_size=4),
)
payloads = st.binary(max_size=60) | mutated_add | json_like.map(msgpack.packb)
messages = st.lists(payloads, max_size=4).flatmap(
    lambda rest: st.sampled_from([ADD, ABORT, START_DP_WAVE, UTILITY, b"\x04", b"", b"\x00\x00"]).map(
        lambda kind: [kind, *rest]
    )
)


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendDouble]:
    """A double with an engine that has served it a first request, so that its line is settled."""
    with FrontendDouble(clients=2) as double:
        # Few tokens at the most, so that a mutated request which is still valid ends soon.
        flags = (f"--handshake-address={double.handshake_address}", "--max-model-len=64", "--log-level=error")
        with EngineProcess(*flags) as engine:
            double.handshake()
            double.add("first", sampling={"stop": []})
            double.reply("first")
            yield double
            assert "Traceback" not in engine.output
            assert not engine.has_ended


_counter = iter(range(10**9))


def _is_served(frontend: FrontendDouble) -> None:
    """Check that a request of another client is served as if nothing had happened."""
    name = f"canary-{next(_counter)}"
    frontend.add(name, client=1, max_tokens=2)
    assert len(frontend.reply(name, client=1).tokens) == 2


@settings(
    deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch=st.lists(messages, min_size=1, max_size=20))
def test_random_and_mutated_messages_cost_nobody_else_anything(
    frontend: FrontendDouble, batch: list[list[bytes]]
) -> None:
    for frames in batch:
        frontend.send(frames)
    _is_served(frontend)


@pytest.mark.parametrize("code", [1, 2, 3, 127, -1 % 128])
@pytest.mark.parametrize("field", ["prompt_embeds", "mm_features", "kv_hints", "sampling_params"])
def test_extension_anywhere_in_a_request_ends_it_with_an_error(frontend: FrontendDouble, field: str, code: int) -> None:
    name = f"{field}-{code}"
    values = {"request_id": name, "prompt_token_ids": [1], "sampling_params": {"max_tokens": 1}}
    items = request_items({**values, field: msgpack.ExtType(code, b"cos\nsystem\n(S'true'\ntR.")}, 22)
    frontend.send([ADD, msgpack.packb(items)])
    assert frontend.reply(name).finish_reason is FinishReason.ERROR
    _is_served(frontend)


def test_request_cut_off_after_its_id_ends_with_an_error(frontend: FrontendDouble) -> None:
    frontend.send([ADD, GOLDEN_ADD.replace(b"golden", b"cutoff")[:12]])
    assert frontend.reply("cutoff").finish_reason is FinishReason.ERROR


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 200_000,
        b"\x81\xa1a" * 200_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x03",
    ],
    ids=["nested arrays", "nested maps", "4 G items", "4 G entries", "4 GB str", "4 GB bin", "4 GB extension"],
)
@pytest.mark.parametrize("kind", [ADD, ABORT, START_DP_WAVE, UTILITY])
def test_bomb_is_dropped(frontend: FrontendDouble, kind: bytes, payload: bytes) -> None:
    frontend.send([kind, payload])
    _is_served(frontend)


def test_unknown_methods_with_odd_arguments_are_all_answered(frontend: FrontendDouble) -> None:
    odd_arguments: list[object] = [None, [], [[[]]], [{"a": b"\0"}], [float("nan")], list(range(1_000))]
    for call_id, arguments in enumerate(odd_arguments):
        frontend.send(write_message(RequestType.UTILITY, [0, 2**63 + call_id, "odd", arguments]))
    wanted = {2**63 + call_id for call_id in range(6)}
    frontend._listen_until(0, lambda: wanted <= set(frontend._utility_replies), "six answers")


def test_giant_ids_and_floods_leave_memory_bounded() -> None:
    with (
        FrontendDouble() as frontend,
        EngineProcess(f"--handshake-address={frontend.handshake_address}", "--log-level=error") as engine,
    ):
        frontend.handshake()
        frontend.add("first")
        frontend.reply("first")
        before = _resident_bytes(engine.process.pid)
        for _ in range(20):
            frontend.add("x" * 10 * MB, max_tokens=1_000)
            frontend.abort("y" * 10 * MB)
            frontend.send([b"\x07" * 10 * MB, b""])
        longest = "z" * MAX_REQUEST_ID_BYTES
        frontend.add(longest, max_tokens=3)
        assert len(frontend.reply(longest, deadline_s=30).tokens) == 3
        assert _resident_bytes(engine.process.pid) - before < 150 * MB


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:  # noqa: PTH123 - a kernel interface, not a path of ours
        return int(statm.read().split()[1]) * resource.getpagesize()
