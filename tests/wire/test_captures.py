# SPDX-License-Identifier: Apache-2.0
"""Recorded traffic of real frontends and a real engine: read to the values that the recording names, and back."""

import ast
import re
from collections.abc import Mapping
from typing import Any, Final

import pytest

from mockengine.wire.handshake import EngineStatus, ReadyResponse, engine_identity, read_ready_response, read_status
from mockengine.wire.messages import (
    COORDINATOR_READY,
    COORDINATOR_SUBSCRIBE,
    Abort,
    Add,
    Message,
    RequestType,
    StartDpWave,
    read_message,
    write_message,
)
from mockengine.wire.outputs import (
    ENGINE_CORE_DEAD,
    EngineCoreDead,
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
from mockengine.wire.requests import EngineCoreRequest, LoraRequest, request_items
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from mockengine.wire.utility import UtilityCall
from tests.wire.forms import padded_envelope, plain, recorded, token_ids

MESSAGES: Final = recorded("frames")
INPUTS: Final = [record for record in MESSAGES if record["direction"] == "input"]
OUTPUTS: Final = [record for record in MESSAGES if record["direction"] == "output"]
LINES: Final = recorded("lines")

# What a SamplingParams of ours leaves to the frontend.
FRONTEND_KEYS: Final = {"watermarking", "routed_experts_prompt_start", "stop"}
RENAMED_KEYS: Final = {"_eos_token_id": "eos_token_id", "_all_stop_token_ids": "all_stop_token_ids"}


def frames_of(record: Mapping[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in record["frames"]]


def tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def request_said(said: list[Any]) -> EngineCoreRequest:
    """Make the value of a recorded EngineCoreRequest of 22 items, position by position."""
    sampling = {RENAMED_KEYS.get(key, key): tuples(value) for key, value in said[3].items() if key not in FRONTEND_KEYS}
    assert len(said) == 22
    assert [said[position] for position in (2, 4, 8, 9, 10, 14, 17, 20, 21)] == [None] * 9
    return EngineCoreRequest(
        request_id=said[0],
        prompt_token_ids=token_ids(*said[1]),
        sampling_params=SamplingParams(**sampling),
        arrival_time=said[5],
        lora_request=said[6] and LoraRequest(*said[6]),
        cache_salt=said[7],
        client_index=said[11],
        current_wave=said[12],
        priority=said[13],
        resumable=said[15],
        external_req_id=said[16],
        reasoning_parser_kwargs=said[18],
        abort_immediately=said[19],
        items=22,
        sampling_keys=frozenset(said[3]),
    )


def message_said(request_type: int, said: Any) -> Message:
    match request_type:
        case 0:
            return Add(request_said(said))
        case 1:
            return Abort(tuple(said))
        case _:
            return UtilityCall(said[0], said[1], said[2], tuple(said[3]))


def output_said(said: list[Any]) -> EngineCoreOutput:
    """Make the value of a recorded EngineCoreOutput of 0.33, position by position."""
    assert len(said) == 19
    assert [said[position] for position in (2, 3, 4, 8, 9, 10, 12, 14, 15, 16, 17)] == [None] * 11
    return EngineCoreOutput(
        request_id=said[0],
        new_token_ids=tuple(said[1]),
        finish_reason=None if said[5] is None else FinishReason(said[5]),
        stop_reason=said[6],
        events=tuple(EngineCoreEvent(EventType(event["type"]), event["timestamp"]) for event in said[7] or ()),
        prefill_stats=said[11] and PrefillStats(**said[11]),
        error=said[18] and RequestError(**said[18]),
    )


def stats_said(said: dict[str, Any]) -> SchedulerStats:
    prefix = {key: value for key, value in said["prefix_cache_stats"].items() if key != "hits_by_source"}
    counts = (
        "num_running_reqs",
        "num_waiting_reqs",
        "num_skipped_waiting_reqs",
        "step_counter",
        "current_wave",
        "kv_cache_usage",
    )
    return SchedulerStats(**{name: said[name] for name in counts}, prefix_cache_stats=PrefixCacheStats(**prefix))


def envelope_said(said: list[Any]) -> Envelope:
    """Make the value of a recorded EngineCoreOutputs of 0.33, position by position."""
    assert len(said) == 9
    assert said[6:8] == [None, None]
    if said[4] is not None:
        call_id, failure, result = said[4]
        return UtilityReply(said[0], said[3], call_id, None if result is None else result[1], failure)
    return StepOutputs(
        engine_index=said[0],
        timestamp=said[3],
        outputs=tuple(output_said(output) for output in said[1]),
        scheduler_stats=said[2] and stats_said(said[2]),
        finished_requests=tuple(said[5] or ()),
        weight_version=said[8],
    )


def test_recordings_are_all_there() -> None:
    kinds = [record["frames"][0] for record in INPUTS]
    assert (kinds.count("00"), kinds.count("01"), kinds.count("03")) == (51, 4, 44)
    assert len(OUTPUTS) == 1084
    assert {record["source"] for record in MESSAGES} == {"s1", "s2", "s3", "s4"}


def test_recorded_frames_decode_to_what_the_recording_says() -> None:
    """The recording itself, before it is compared with."""
    for record in MESSAGES:
        assert plain(frames_of(record)[-1]) == record["said"]


def test_every_message_of_a_real_frontend_reads_as_recorded() -> None:
    for record in INPUTS:
        frames = frames_of(record)
        assert read_message(frames, 0) == message_said(frames[0][0], record["said"])


def test_every_message_of_a_real_frontend_can_be_written_again() -> None:
    for record in INPUTS:
        frames = frames_of(record)
        request_type = RequestType(frames[0][0])
        payload: object = record["said"]
        if request_type is RequestType.ADD:
            # By field name and back to positions: the inverse of reading, but for what only a frontend wants to know.
            payload = request_items(_fields_by_name(record["said"]), 22)
        ours = write_message(request_type, payload)
        assert ours[0] == frames[0]
        assert plain(ours[1]) == record["said"]
        assert read_message(ours, 0) == read_message(frames, 0)


def _fields_by_name(said: list[Any]) -> dict[str, object]:
    # Every position the recordings use.
    positions = {
        "request_id": 0,
        "prompt_token_ids": 1,
        "sampling_params": 3,
        "arrival_time": 5,
        "lora_request": 6,
        "cache_salt": 7,
        "client_index": 11,
        "current_wave": 12,
        "priority": 13,
        "resumable": 15,
        "external_req_id": 16,
        "reasoning_parser_kwargs": 18,
        "abort_immediately": 19,
    }
    return {name: said[position] for name, position in positions.items()}


def test_every_envelope_of_a_real_engine_reads_as_recorded() -> None:
    for record in OUTPUTS:
        assert read_envelope(frames_of(record)) == envelope_said(record["said"])


def test_every_envelope_of_a_real_engine_is_written_again_but_for_trailing_defaults() -> None:
    for record in OUTPUTS:
        frames = frames_of(record)
        (ours,) = write_envelope(read_envelope(frames))
        assert len(ours) <= len(frames[0])
        assert padded_envelope(ours) == padded_envelope(frames[0])


# Recordings without bytes: each line becomes the value it tells of, which must survive our encoder and reader.

STEP_LINE: Final = re.compile(r"(?:client\d*|COORD)\s+idx=(\d+) (.*)")
STATS: Final = re.compile(
    r"stats\(run=(?P<run>\d+) wait=(?P<wait>\d+) kv=(?P<kv>[0-9.]+) step_counter=(?P<step>\d+) wave=(?P<wave>\d+)\)"
)
OUTPUT: Final = re.compile(r"(?P<id>[a-z][\w-]*)\[(?P<tokens>\d+)\](?: ev=(?P<events>[QSP]+))?(?: FIN=(?P<finish>\d))?")
FINISHED: Final = re.compile(r"finished=(\[.*?\])")
EVENTS: Final = {"Q": EventType.QUEUED, "S": EventType.SCHEDULED, "P": EventType.PREEMPTED}


def texts(pattern: str) -> list[str]:
    return [record["line"] for record in LINES if re.match(pattern, record["line"])]


def step_told(line: str) -> StepOutputs:
    heading = STEP_LINE.match(line)
    assert heading is not None, line
    stats, finished = STATS.search(line), FINISHED.search(line)
    outputs = OUTPUT.finditer(heading[2].split("stats(")[0].split("finished=")[0])
    return StepOutputs(
        engine_index=int(heading[1]),
        timestamp=1.0,
        outputs=tuple(
            EngineCoreOutput(
                request_id=output["id"],
                new_token_ids=(7,) * int(output["tokens"]),
                finish_reason=None if output["finish"] is None else FinishReason(int(output["finish"])),
                events=tuple(EngineCoreEvent(EVENTS[letter], 1.0) for letter in output["events"] or ""),
            )
            for output in outputs
        ),
        scheduler_stats=stats
        and SchedulerStats(
            num_running_reqs=int(stats["run"]),
            num_waiting_reqs=int(stats["wait"]),
            step_counter=int(stats["step"]),
            current_wave=int(stats["wave"]),
            kv_cache_usage=float(stats["kv"]),
        ),
        finished_requests=tuple(ast.literal_eval(finished[1])) if finished else (),
    )


def retold(step: StepOutputs) -> str:
    """Say a step in the words of the recording."""
    parts = []
    for output in step.outputs:
        letters = "".join(event.type.name[0] for event in output.events)
        parts.append(f"{output.request_id}[{len(output.new_token_ids)}]")
        parts += [f"ev={letters}"] if letters else []
        parts += [f"FIN={output.finish_reason:d}"] if output.finish_reason is not None else []
    stats = step.scheduler_stats
    if stats is not None:
        counts = f"run={stats.num_running_reqs} wait={stats.num_waiting_reqs} kv={stats.kv_cache_usage:.4f}"
        parts.append(f"stats({counts} step_counter={stats.step_counter} wave={stats.current_wave})")
    parts += [f"finished={list(step.finished_requests)}"] if step.finished_requests else []
    return f"idx={step.engine_index} {' '.join(parts)}"


def test_steps_told_survive_being_written_and_read() -> None:
    told = texts(r"(client\d?|COORD) +idx=\d (?!UTIL=|START_WAVE=|WAVE_COMPLETE=)")
    assert len(told) == 120
    for text in told:
        step = read_envelope(write_envelope(step_told(text)))
        assert step == step_told(text)
        words = re.sub(r"^\S+\s+|\s*hex=.*$", "", text)
        assert retold(step) == words


WAVE: Final = re.compile(r"COORD\s+idx=(\d) (START_WAVE|WAVE_COMPLETE)=(\d+) hex=([0-9a-f]+)")


def test_waves_of_a_real_engine_read_as_told_and_are_written_again() -> None:
    waves = [match for text in texts("COORD") if (match := WAVE.match(text))]
    assert len(waves) == 14
    for rank, kind, number, payload in (wave.groups() for wave in waves):
        envelope = read_envelope([bytes.fromhex(payload)])
        make = StartWave if kind == "START_WAVE" else WaveComplete
        assert isinstance(envelope, make)
        assert envelope == make(int(rank), envelope.timestamp, int(number))
        assert padded_envelope(write_envelope(envelope)[0]) == padded_envelope(bytes.fromhex(payload))


def test_statuses_told_are_written_and_read() -> None:
    told = [text.split(maxsplit=2)[1:] for text in texts("hs ")]
    assert len(told) == 20
    for identity, text in told:
        said = ast.literal_eval(text)
        extra = {key: value for key, value in said.items() if key not in ("status", "local", "headless")}
        status = EngineStatus(said["status"], extra=extra)
        assert bytes.fromhex(identity) in (engine_identity(0), engine_identity(1))
        assert plain(status.to_wire()) == said
        assert read_status(status.to_wire()) == status


def test_ready_responses_told_agree_with_ours_in_the_keys_they_tell() -> None:
    told = [ast.literal_eval(text.split(maxsplit=3)[3]) for text in texts("ready response")]
    assert len(told) == 10
    for said in told:
        response = ReadyResponse(
            max_model_len=512,
            block_size=16,
            dtype="float32",
            vllm_version="0.33.0",
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            instance_id="i",
            **said,
        )
        assert said.items() <= read_ready_response(response.to_wire()).items()


UTILITY_CALL: Final = re.compile(r"-> UTIL (\w+) (\(.*\))(?: (\d))?$")
UTILITY_REPLY: Final = re.compile(r"client\d? idx=(\d) UTIL=(.*)$")


def test_utility_calls_told_are_written_and_read() -> None:
    calls = [match.groups() for text in texts("-> UTIL") if (match := UTILITY_CALL.match(text))]
    assert len(calls) == 11
    for call_id, (method, args, client) in enumerate(calls):
        call = UtilityCall(int(client or 0), call_id, method, ast.literal_eval(args))
        assert read_message(write_message(RequestType.UTILITY, call.to_wire()), 0) == call


def test_utility_replies_told_are_written_and_read() -> None:
    replies = [match.groups() for text in texts("client") if (match := UTILITY_REPLY.match(text))]
    assert len(replies) == 10
    for rank, said in replies:
        call_id, failure, result = ast.literal_eval(said)
        reply = UtilityReply(int(rank), 1.0, call_id, None if result is None else result[1], failure)
        (payload,) = write_envelope(reply)
        assert plain(payload)[4] == [call_id, failure, result]
        assert read_envelope([payload]) == reply


def test_aborts_and_waves_told_are_written_and_read() -> None:
    aborts = [ast.literal_eval(text.removeprefix("-> ABORT ")) for text in texts("-> ABORT")]
    waves = [ast.literal_eval(text.removeprefix("-> START_DP_WAVE ")) for text in texts("-> START_DP_WAVE")]
    assert (len(aborts), len(waves)) == (6, 6)
    for ids in aborts:
        assert read_message(write_message(RequestType.ABORT, list(ids)), 0) == Abort(ids)
    for wave, exclude in waves:
        assert read_message(write_message(RequestType.START_DP_WAVE, [wave, exclude]), 0) == StartDpWave(wave, exclude)


def test_requests_told_are_written_and_read() -> None:
    told = re.compile(r"-> ADD engine \d (\S+) max_tokens=(\d+) wave=(\d+)$")
    adds = [match.groups() for text in texts("-> ADD") if (match := told.match(text))]
    assert len(adds) == len(texts("-> ADD")) == 38
    for request_id, max_tokens, wave in adds:
        values = {
            "request_id": request_id,
            "prompt_token_ids": [1],
            "sampling_params": {"max_tokens": int(max_tokens)},
            "current_wave": int(wave),
        }
        assert read_message(write_message(RequestType.ADD, request_items(values, 22)), 0) == Add(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=token_ids(1),
                sampling_params=SamplingParams(max_tokens=int(max_tokens)),
                current_wave=int(wave),
                sampling_keys=frozenset({"max_tokens"}),
            )
        )


def test_words_of_a_real_engine_and_coordinator_are_ours() -> None:
    deaths = [ast.literal_eval(text.split(maxsplit=1)[1].removesuffix(" LEN 1")) for text in texts(r"client \[b")]
    assert deaths == [[ENGINE_CORE_DEAD]] * 3
    with pytest.raises(EngineCoreDead):
        read_envelope(deaths[0])
    assert texts("coordinator socket") == [f"coordinator socket: subscribe [{COORDINATOR_SUBSCRIBE!r}]"] * 2
    assert texts("-> READY") == [f"-> {COORDINATOR_READY.decode()}"] * 2


def test_no_line_told_is_left_out() -> None:
    statuses, ready_responses, steps, waves, replies, deaths = 20, 10, 120, 14, 10, 3
    adds, calls, aborts, wakings, subscriptions, go_aheads = 38, 11, 6, 6, 2, 2
    notes_of_the_recorder = len(texts("all ready"))
    from_engines = statuses + ready_responses + steps + waves + replies + deaths + subscriptions
    from_frontends = adds + calls + aborts + wakings + go_aheads
    assert from_engines + from_frontends + notes_of_the_recorder == len(LINES) == 250
