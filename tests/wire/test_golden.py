# SPDX-License-Identifier: Apache-2.0
"""The protocol's golden bytes: what vLLM's own classes encode, decoded to values written out by hand, and back."""

import struct
from dataclasses import replace
from typing import Any

import pytest

from mockengine.wire.codec import RawView, pack, unpack
from mockengine.wire.handshake import (
    EngineStatus,
    Init,
    ReadyResponse,
    read_init,
    read_ready_response,
    read_status,
)
from mockengine.wire.logprobs import LogprobsLists
from mockengine.wire.messages import (
    COORDINATOR_READY,
    COORDINATOR_SUBSCRIBE,
    Abort,
    Add,
    RequestType,
    StartDpWave,
    read_message,
    write_message,
)
from mockengine.wire.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    Envelope,
    EventType,
    FinishReason,
    RequestError,
    StartWave,
    StepOutputs,
    UtilityReply,
    WaveComplete,
    read_envelope,
    write_envelope,
)
from mockengine.wire.requests import EngineCoreRequest, request_items
from mockengine.wire.sampling import SamplingParams, read_sampling_params
from mockengine.wire.stats import PrefillStats, SchedulerStats
from mockengine.wire.tensors import Tensor
from mockengine.wire.utility import UtilityCall
from tests.wire.forms import golden, padded_envelope, plain, token_ids

ONE_TOKEN = EngineCoreOutput(request_id="r1", new_token_ids=(42,))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def step(*outputs: EngineCoreOutput, **fields: Any) -> StepOutputs:
    return StepOutputs(engine_index=0, timestamp=1000.5, outputs=outputs, **fields)


ENVELOPES: dict[str, Envelope] = {
    "outputs_full": step(ONE_TOKEN),
    "outputs_truncated": step(ONE_TOKEN),
    "first_token": step(
        replace(
            ONE_TOKEN,
            events=(EngineCoreEvent(EventType.QUEUED, 1000.0), EngineCoreEvent(EventType.SCHEDULED, 1000.25)),
            prefill_stats=PrefillStats(
                num_prompt_tokens=4, num_computed_tokens=2, num_cached_tokens=2, num_local_cached_tokens=2
            ),
        )
    ),
    "finish_stop": step(replace(ONE_TOKEN, finish_reason=FinishReason.STOP, stop_reason=42), finished_requests=("r1",)),
    "logprobs": step(
        replace(
            ONE_TOKEN,
            new_logprobs=LogprobsLists(
                token_ids=Tensor("<i4", (1, 3), ints(42, 7, 9)),
                logprobs=Tensor("<f4", (1, 3), floats(-0.5, -1, -2)),
                ranks=Tensor("<i4", (1,), ints(1)),
            ),
        )
    ),
    "prompt_logprobs": step(
        replace(
            ONE_TOKEN,
            new_prompt_logprobs=LogprobsLists(
                token_ids=Tensor("int32", (2, 2), ints(2, 7, 3, 7)),
                logprobs=Tensor("float32", (2, 2), floats(-1.5, -0.5, -1.5, -0.5)),
                ranks=Tensor("int32", (2,), ints(2, 2)),
            ),
        )
    ),
    "stats": step(scheduler_stats=SchedulerStats(num_running_reqs=1)),
    "utility_reply": UtilityReply(0, 1000.5, 7, result=["generate"]),
    "utility_failure": UtilityReply(0, 1000.5, 7, failure="Call to sleep method failed: x"),
    "paused_rejection": step(
        EngineCoreOutput(
            request_id="r1",
            finish_reason=FinishReason.ERROR,
            error=RequestError(code="engine_paused", message="m", retryable=True),
        ),
        finished_requests=("r1",),
    ),
    "pooling_output": step(
        EngineCoreOutput(
            request_id="r1",
            pooling_output=Tensor("float32", (4,), floats(1, 1, 1, 1)),
            finish_reason=FinishReason.STOP,
        )
    ),
    "wave_complete": WaveComplete(0, 1000.5, 3),
    "start_wave": StartWave(0, 1000.5, 4),
}


@pytest.mark.parametrize("name", ENVELOPES)
def test_envelope_reads_as_described(name: str) -> None:
    assert read_envelope([golden(name)]) == ENVELOPES[name]


@pytest.mark.parametrize("name", ENVELOPES)
def test_our_envelope_reads_back_as_the_same_value(name: str) -> None:
    assert read_envelope(write_envelope(ENVELOPES[name])) == ENVELOPES[name]


@pytest.mark.parametrize("name", ENVELOPES)
def test_our_envelope_is_the_real_one_but_for_trailing_defaults(name: str) -> None:
    (ours,) = write_envelope(ENVELOPES[name])
    expected = padded_envelope(golden(name))
    if name == "stats":
        # The golden bytes are of a fresh object; a running engine names the three stages.
        assert expected[2]["num_kv_fetch_reqs_by_stage"] == {}
        expected[2]["num_kv_fetch_reqs_by_stage"] = {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0}
    assert padded_envelope(ours) == expected


def test_our_envelope_of_one_token_is_the_shortest_form_byte_for_byte() -> None:
    assert write_envelope(ENVELOPES["outputs_full"]) == [golden("outputs_truncated")]


STATUSES = {"hello": EngineStatus("HELLO"), "ready": EngineStatus("READY")}


@pytest.mark.parametrize("name", STATUSES)
def test_status_reads_as_described_and_is_written_byte_for_byte(name: str) -> None:
    assert read_status(golden(name)) == STATUSES[name]
    assert STATUSES[name].to_wire() == golden(name)


def test_ready_of_a_mixture_of_experts_carries_the_hash_of_its_configuration() -> None:
    status = EngineStatus("READY", extra={"parallel_config_hash": "fa34a987"})
    assert plain(status.to_wire()) == {
        "status": "READY",
        "local": False,
        "headless": True,
        "parallel_config_hash": "fa34a987",
    }
    assert read_status(status.to_wire()) == status


def test_init_reads_as_described_and_is_written_byte_for_byte() -> None:
    init = Init(inputs=("tcp://h:1",), outputs=("tcp://h:2",))
    assert read_init(golden("init")) == init
    assert init.to_wire() == golden("init")
    assert not init.has_coordinator
    assert init.expected_data_parallel_size is None


def test_init_of_a_mixture_of_experts_names_coordinator_and_settings() -> None:
    init = Init(
        inputs=("tcp://h:1", "tcp://h:3"),
        outputs=("tcp://h:2", "tcp://h:4"),
        coordinator_input="tcp://h:5",
        coordinator_output="tcp://h:6",
        frontend_stats_publish_address="tcp://h:7",
        parallel_config={
            "data_parallel_master_ip": "127.0.0.1",
            "data_parallel_master_port": 29501,
            "_data_parallel_master_port_list": [29502, 29503],
            "_coord_store_port": 0,
            "data_parallel_size": 2,
        },
    )
    assert read_init(init.to_wire()) == init
    assert init.has_coordinator
    assert init.expected_data_parallel_size == 2


def test_ready_response_is_written_byte_for_byte() -> None:
    response = ReadyResponse(
        max_model_len=4096,
        num_gpu_blocks=1000,
        block_size=16,
        dp_stats_address=None,
        dtype="float32",
        vllm_version="0.33.0",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        instance_id="mock",
        kv_cache_size_tokens=16_000,
        kv_cache_max_concurrency=3.9,
        effective_attention_block_size=16,
    )
    assert plain(response.to_wire()) == plain(golden("ready_response"))
    assert list(plain(response.to_wire())) == list(plain(golden("ready_response")))
    assert response.to_wire() == golden("ready_response")
    assert read_ready_response(golden("ready_response")) == plain(golden("ready_response"))


PYTHON_SAMPLING = {
    "temperature": 0.0,
    "stop": [],
    "stop_token_ids": [],
    "max_tokens": 8,
    "bad_words": [],
    "skip_reading_prefix_cache": False,
}
RUST_SAMPLING = {
    "temperature": 0.699999988079071,
    "watermarking": True,
    "top_p": 0.8999999761581421,
    "top_k": 0,
    "max_tokens": 4,
    "min_tokens": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": [0],
    "_eos_token_id": 2,
    "_all_stop_token_ids": [0, 2],
    "routed_experts_prompt_start": 0,
}
ADDS: dict[str, tuple[EngineCoreRequest, dict[str, object]]] = {
    "add_python": (
        EngineCoreRequest(
            request_id="r1",
            prompt_token_ids=token_ids(1, 2),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=8),
            arrival_time=5.0,
            items=22,
            sampling_keys=frozenset(PYTHON_SAMPLING),
        ),
        {"request_id": "r1", "prompt_token_ids": [1, 2], "sampling_params": PYTHON_SAMPLING, "arrival_time": 5.0},
    ),
    "add_rust": (
        EngineCoreRequest(
            request_id="cmpl-460c4fe9-406d6b5f",
            prompt_token_ids=token_ids(298, 297),
            sampling_params=SamplingParams(
                temperature=0.699999988079071,
                top_p=0.8999999761581421,
                max_tokens=4,
                stop_token_ids=(0,),
                eos_token_id=2,
                all_stop_token_ids=(0, 2),
            ),
            arrival_time=1796039067.5984058,
            external_req_id="cmpl-460c4fe9",
            reasoning_parser_kwargs={"chat_template_kwargs": {}},
            items=22,
            sampling_keys=frozenset(RUST_SAMPLING),
        ),
        {
            "request_id": "cmpl-460c4fe9-406d6b5f",
            "prompt_token_ids": [298, 297],
            "sampling_params": RUST_SAMPLING,
            "arrival_time": 1796039067.5984058,
            "external_req_id": "cmpl-460c4fe9",
            "reasoning_parser_kwargs": {"chat_template_kwargs": {}},
        },
    ),
}


@pytest.mark.parametrize("name", ADDS)
def test_add_reads_as_described(name: str) -> None:
    request, _ = ADDS[name]
    message = read_message([b"\x00", golden(name)], 0)
    assert message == Add(request)


@pytest.mark.parametrize("name", ADDS)
def test_our_add_is_the_real_one(name: str) -> None:
    request, values = ADDS[name]
    frames = write_message(RequestType.ADD, request_items(values, 22))
    assert frames[0] == b"\x00"
    assert plain(frames[1]) == plain(golden(name))
    assert read_message(frames, 0) == Add(request)


def test_golden_adds_tell_which_frontend_sent_them() -> None:
    assert ADDS["add_python"][0].is_from_python
    assert not ADDS["add_rust"][0].is_from_python


MESSAGES = {
    "abort": (RequestType.ABORT, Abort(("r1",))),
    "utility": (RequestType.UTILITY, UtilityCall(0, 7, "sleep", (1, "abort"))),
    "start_dp_wave": (RequestType.START_DP_WAVE, StartDpWave(1, 0)),
    "start_dp_wave_excluding_an_identity": (RequestType.START_DP_WAVE, StartDpWave(1, b"\x00\x00")),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message_reads_as_described(name: str) -> None:
    request_type, message = MESSAGES[name]
    assert read_message([bytes([request_type]), golden(name)], 0) == message


def test_our_messages_are_the_real_ones_byte_for_byte() -> None:
    assert write_message(RequestType.ABORT, ["r1"]) == [b"\x01", golden("abort")]
    call = UtilityCall(0, 7, "sleep", (1, "abort"))
    assert write_message(RequestType.UTILITY, call.to_wire()) == [b"\x03", golden("utility")]
    assert write_message(RequestType.START_DP_WAVE, [1, 0]) == [b"\x02", golden("start_dp_wave")]
    assert write_message(RequestType.START_DP_WAVE, [1, b"\x00\x00"]) == [
        b"\x02",
        golden("start_dp_wave_excluding_an_identity"),
    ]


def test_coordinator_says_and_hears_single_words() -> None:
    assert golden("coordinator_subscribe") == COORDINATOR_SUBSCRIBE
    assert golden("coordinator_ready") == COORDINATOR_READY


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("extra_args_rust", "extra_args", {"n": 5, "mock_text": "hi", "b": False, "f": 0.25}),
        ("extra_args_python", "extra_args", {"mock_text": "hi", "n": 5, "f": 0.25, "b": 0}),
        ("logit_bias_rust", "logit_bias", {5: 1.0}),
        ("logit_bias_python", "logit_bias", {5: 1.0}),
    ],
)
def test_sampling_field_as_frontends_send_it(name: str, field: str, value: object) -> None:
    one_key_map = b"\x81" + golden(name)
    assert read_sampling_params(unpack(one_key_map), "sampling_params") == SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert plain(one_key_map) == plain(pack({field: value}))


def test_raw_view_is_the_array_bytes_of_extension_3() -> None:
    assert unpack(b"\xc7\x02\x03\x01\x02") == RawView(b"\x01\x02")
