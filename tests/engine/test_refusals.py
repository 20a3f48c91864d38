# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot be served, and messages that cannot be read: each costs itself and nothing else."""

from dataclasses import replace

import pytest

from mockengine.wire.lines import LINES, NEWEST, Line
from mockengine.wire.messages import Add, StartDpWave, Unreadable
from mockengine.wire.outputs import Envelope, FinishReason, RequestError, StartWave, StepOutputs, UtilityReply
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT, PoolingParams
from mockengine.wire.utility import UtilityCall
from tests.support.rig import CONFIG, Rig, request


def _only_error(envelopes: list[Envelope]) -> RequestError | None:
    (envelope,) = envelopes
    assert isinstance(envelope, StepOutputs)
    (output,) = envelope.outputs
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.ERROR, ())
    return output.error


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (request(sampling_params=None), "neither sampling_params nor pooling_params are set"),
        (request(prompt=()), "the prompt is empty"),
        (request(prompt_token_ids=None), "the prompt is empty"),
        (request(prompt=range(65)), "the prompt has 65 tokens where max_model_len is 64"),
        (request(client_index=3), "client_index 3 where the frontend has 1 clients"),
    ],
)
def test_what_cannot_be_served_ends_with_an_error_that_names_the_reason(broken: EngineCoreRequest, reason: str) -> None:
    rig = Rig()
    assert _only_error(rig.receive(Add(broken))) == RequestError("validation_error", reason)
    assert rig.watcher.refused == [("r1", reason)]
    assert rig.ranks.num_requests == 0


@pytest.mark.parametrize("how", ["refused", "unreadable", "shutting down"])
def test_pooling_request_ends_with_the_tensor_that_keeps_a_python_frontend_alive(how: str) -> None:
    rig = Rig()
    pooling = request(sampling_params=None, pooling_params=PoolingParams("embed", use_activation=True, dimensions=None))
    message = Unreadable("broken", "ADD", (1, 2), "r1", is_pooling=True) if how == "unreadable" else Add(pooling)
    if how == "shutting down":
        rig.ranks.begin_shutdown()
    (envelope,) = rig.receive(message)
    assert isinstance(envelope, StepOutputs)
    assert envelope.outputs[0].pooling_output == EMPTY_POOLING_OUTPUT
    expected = FinishReason.ABORT if how == "shutting down" else FinishReason.ERROR
    assert envelope.outputs[0].finish_reason is expected


def test_duplicate_id_is_refused_and_the_first_request_goes_on_untouched() -> None:
    alone, rig = Rig(), Rig()
    alone.add(request())
    alone.run()
    rig.add(request())
    rig.step()
    error = _only_error(rig.receive(Add(request(prompt=(9, 9)))))
    assert error == RequestError("validation_error", "a request of the same id is in flight")
    rig.run()
    assert rig.tokens("r1") == alone.tokens("r1")
    assert rig.finish_reason("r1") is FinishReason.LENGTH


def test_id_can_be_used_again_once_its_request_has_ended() -> None:
    rig = Rig()
    rig.add(request())
    rig.run()
    rig.add(request())
    rig.run()
    assert len(rig.tokens("r1")) == 8


@pytest.mark.parametrize(
    "line", [line for line in LINES if "error" not in line.output_fields], ids=lambda line: line.name
)
def test_line_that_knows_no_error_details_gets_a_plain_error(line: object) -> None:
    rig = Rig(line=line)  # type: ignore[arg-type]  # pytest types parameters as object
    assert _only_error(rig.receive(Add(request(prompt=())))) is None


def test_unreadable_request_whose_id_is_known_ends_with_an_error() -> None:
    rig = Rig(replace(CONFIG, clients=2), line=NEWEST)
    message = Unreadable("max_tokens: str", "ADD", (1, 20), request_id="r9")
    error = _only_error(rig.receive(message, client=1))
    assert error == RequestError("unreadable_request", "the engine could not read the request: max_tokens: str")
    assert rig.heard[0][0] == 1
    assert rig.watcher.dropped == [message]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_unreadable_first_request_is_answered_in_a_way_that_every_line_survives(line: Line) -> None:
    rig = Rig()
    rig.speaks = line
    assert _only_error(rig.receive(Unreadable("broken", "ADD", (1, 2), request_id="r9"))) is None


def test_unreadable_request_does_not_end_the_one_in_flight_under_its_id() -> None:
    rig = Rig()
    rig.add(request())
    rig.step()
    assert rig.receive(Unreadable("truncated", "ADD", (1, 5), request_id="r1")) == []
    rig.run()
    assert rig.finish_reason("r1") is FinishReason.LENGTH


def test_unreadable_call_whose_id_is_known_is_answered() -> None:
    rig = Rig()
    message = Unreadable("args: str", "UTILITY", (1, 9), call=UtilityCall(0, 5, "sleep"))
    assert rig.receive(message) == [UtilityReply(0, rig.now, 5, None, "Call to sleep method failed: args: str")]


def test_message_of_which_nothing_can_be_read_is_dropped() -> None:
    rig = Rig()
    assert rig.receive(Unreadable("not msgpack", "ADD", (1, 1))) == []
    assert len(rig.watcher.dropped) == 1


def test_coordinator_can_only_start_waves() -> None:
    rig = Rig(replace(CONFIG, has_coordinator=True, has_waves=True))
    assert rig.receive(Add(request()), client=-1) == []
    assert rig.ranks.num_requests == 0
    assert rig.watcher.dropped[0].reason == "only START_DP_WAVE comes from a coordinator"
    assert rig.receive(StartDpWave(0), client=-1) == [StartWave(0, rig.now, 0)]
    assert rig.ranks.engines[0].wave.running
