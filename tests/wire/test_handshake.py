# SPDX-License-Identifier: Apache-2.0
"""The start-up messages: what makes a frontend exit is refused, what is odd but harmless is not."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from mockengine.wire.codec import WireError
from mockengine.wire.handshake import (
    EngineStatus,
    Init,
    ReadyResponse,
    engine_identity,
    read_init,
    read_ready_response,
    read_status,
)
from tests.wire.forms import golden, plain

RESPONSE = ReadyResponse(
    max_model_len=4096,
    num_gpu_blocks=1000,
    block_size=16,
    dp_stats_address=None,
    dtype="bfloat16",
    vllm_version="0.33.0",
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    instance_id="i",
)


def test_identity_is_the_rank_in_two_bytes() -> None:
    assert [engine_identity(rank) for rank in (0, 1, 258)] == [b"\x00\x00", b"\x01\x00", b"\x02\x01"]


def test_ready_response_has_every_key_any_frontend_requires() -> None:
    required = {
        *("max_model_len", "num_gpu_blocks", "block_size", "dp_stats_address", "dtype", "vllm_version", "world_size"),
        *("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"),
        *("data_parallel_rank", "max_num_seqs", "max_num_batched_tokens", "instance_id", "supports_lora", "max_loras"),
    }
    written = plain(RESPONSE.to_wire())
    assert required <= written.keys()
    assert len(written) == 28
    assert read_ready_response(RESPONSE.to_wire()) == written


def test_ready_response_advertises_kv_events_as_a_map() -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://h:5557", "topic": "kv"}
    assert plain(replace(RESPONSE, kv_events_config=config).to_wire())["kv_events_config"] == config


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ready_response_of_a_dtype_that_rust_knows_is_written(dtype: str) -> None:
    assert plain(replace(RESPONSE, dtype=dtype).to_wire())["dtype"] == dtype


@pytest.mark.parametrize("dtype", ["auto", "half", "torch.bfloat16", "float64", "fp8", ""])
def test_ready_response_of_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"dtype: {dtype} where one of float16, bfloat16, float32 is expected"):
        replace(RESPONSE, dtype=dtype).to_wire()


@pytest.mark.parametrize(("supports_lora", "max_loras"), [(True, 0), (False, 4)])
def test_ready_response_that_contradicts_itself_on_lora_is_refused(supports_lora: bool, max_loras: int) -> None:  # noqa: FBT001 - pytest passes it by name
    with pytest.raises(ValueError, match=f"max_loras: {max_loras} where supports_lora is {supports_lora}"):
        replace(RESPONSE, supports_lora=supports_lora, max_loras=max_loras).to_wire()


def test_ready_response_with_lora_is_written() -> None:
    written = plain(replace(RESPONSE, supports_lora=True, max_loras=4).to_wire())
    assert (written["supports_lora"], written["max_loras"]) == (True, 4)


def test_status_says_more_where_there_is_more_to_say() -> None:
    status = EngineStatus("READY", extra={"num_gpu_blocks": 10, "dp_stats_address": None})
    assert read_status(status.to_wire()) == status
    local = msgpack.packb({"status": "HELLO", "local": True, "headless": False})
    assert read_status(local) == EngineStatus("HELLO", local=True, headless=False)


@pytest.mark.parametrize("value", [None, [], {}, {"status": 1}, {1: "HELLO"}, "HELLO"])
def test_what_is_no_status_is_refused(value: Any) -> None:
    with pytest.raises(WireError):
        read_status(msgpack.packb(value))


def addresses(**changes: Any) -> bytes:
    said = plain(golden("init"))["addresses"] | changes
    data = msgpack.packb({"addresses": said, "parallel_config": {}})
    assert isinstance(data, bytes)
    return data


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (addresses(inputs=[]), "addresses: 0 inputs and 1 outputs where one of each per client is expected"),
        (addresses(inputs=["tcp://h:1"] * 2), "addresses: 2 inputs and 1 outputs where one of each"),
        (addresses(inputs=[1]), "addresses.inputs[0]: int 1 where a str is expected"),
        (addresses(outputs=None), "addresses.outputs: nil where an array is expected"),
        (addresses(coordinator_input="tcp://h:3"), "addresses: only one of the two coordinator addresses is set"),
        (addresses(coordinator_output="tcp://h:3"), "addresses: only one of the two coordinator addresses is set"),
        (addresses(coordinator_input=1, coordinator_output=1), "addresses.coordinator_input: int 1"),
        (msgpack.packb({}), "addresses: nil where a map is expected"),
        (msgpack.packb([]), "INIT: array of 0 where a map is expected"),
        (msgpack.packb({"addresses": {}, "parallel_config": []}), "addresses.inputs: nil"),
        (b"READY", "not msgpack"),
        (b"", "not msgpack"),
    ],
)
def test_what_is_no_init_is_refused_with_the_reason(frame: bytes, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        read_init(frame)
    assert str(caught.value).startswith(reason)


def test_init_may_lack_what_is_nil() -> None:
    frame = msgpack.packb({"addresses": {"inputs": ["tcp://h:1"], "outputs": ["tcp://h:2"], "later": 1}})
    assert read_init(frame) == Init(inputs=("tcp://h:1",), outputs=("tcp://h:2",))


@pytest.mark.parametrize(
    "value", [None, [], {}, {"max_model_len": 0, "num_gpu_blocks": 1, "block_size": 1}, {"max_model_len": "x"}]
)
def test_what_is_no_ready_response_is_refused(value: Any) -> None:
    with pytest.raises(WireError):
        read_ready_response(msgpack.packb(value))
