# SPDX-License-Identifier: Apache-2.0
"""The real Python frontend with the engine behind it. A start takes ten seconds and more, so few serve many tests."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import PythonFrontend
from tests.support import checks, count_checks, reasoning_checks, steering_checks, tool_checks
from tests.support.examples import run_example
from tests.support.python_frontend import python_frontend
from tests.support.stack import MODEL, MODEL_NAME, MOE_MODEL, Stack, serving, wait_until

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def python() -> Path:
    return python_frontend(report=print)


@pytest.fixture(scope="module")
def one_rank(python: Path) -> Iterator[Stack]:
    # At a pace: without one the longest reply is said before this frontend has noticed that its client is gone.
    with PythonFrontend(python, MODEL) as frontend, serving(frontend, "--itl-ms=0.2") as stack:
        yield stack


@pytest.fixture(scope="module")
def four_ranks(python: Path) -> Iterator[Stack]:
    flags = ("--enable-prompt-tokens-details",)
    with (
        PythonFrontend(python, MODEL, data_parallel_size=4, api_server_count=4, extra_args=flags) as frontend,
        serving(frontend, "--engine-count=4") as stack,
    ):
        yield stack


@pytest.mark.parametrize(
    "check",
    [
        *checks.BASIC,
        checks.metrics_count_exactly,
        checks.many_streams_at_once,
        checks.same_prompt_gives_the_same_tokens_as_on_the_double,
        count_checks.stop_strings_cut_what_is_said,
        count_checks.scores_are_as_many_as_tokens,
        count_checks.usage_is_exact,
        count_checks.usage_counts_all_replies,
    ],
    ids=lambda check: check.__name__,
)
def test_one_rank(one_rank: Stack, check: Callable[[Stack], None]) -> None:
    check(one_rank)


@pytest.mark.parametrize(
    "check",
    [
        steering_checks.tokens_are_said_as_asked,
        steering_checks.moments_are_kept,
        steering_checks.who_hangs_is_aborted_when_its_client_goes_away,
    ],
    ids=lambda check: check.__name__,
)
def test_clients_steer_their_requests(one_rank: Stack, check: Callable[[Stack], None]) -> None:
    check(one_rank)


def test_errors_that_are_asked_for_are_errors(one_rank: Stack) -> None:
    # The bool arrives as 1, the list as it is; 0.32 knows of no error but that there is one.
    for asked in ({"mock_error_retryable": True}, {"mock_token_ids": [300], "mock_fault": "error"}, {"mock_txt": "x"}):
        with pytest.raises(openai.InternalServerError):
            steering_checks.steered(one_rank, asked)
    refused = [entry["reason"] for entry in one_rank.engine.logged("request refused") if "mock" in entry["reason"]]
    assert len(refused) == 1
    assert "mock_txt: unknown" in refused[0]
    checks.completion(one_rank)


def test_n_replies_to_one_prompt_differ_and_reproduce(one_rank: Stack) -> None:
    def texts() -> list[str]:
        reply = one_rank.client().completions.create(model=MODEL_NAME, prompt=checks.PROMPT, max_tokens=12, n=3)
        return [choice.text for choice in reply.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_the_example_of_the_docs_runs(one_rank: Stack) -> None:
    run_example(one_rank, "Several replies, and who goes first")


def test_list_of_prompts_gives_each_its_own_text(one_rank: Stack) -> None:
    reply = one_rank.client().completions.create(model=MODEL_NAME, prompt=["one", "two", "one"], max_tokens=12)
    texts = [choice.text for choice in reply.choices]
    assert texts[0] == texts[2] != texts[1]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 36


def test_stop_string_ends_the_reply_and_frees_the_request(one_rank: Stack) -> None:
    text = one_rank.client().completions.create(model=MODEL_NAME, prompt=checks.PROMPT, max_tokens=200).choices[0].text
    stop = text.split()[5]
    reply = one_rank.client().completions.create(model=MODEL_NAME, prompt=checks.PROMPT, max_tokens=200, stop=[stop])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == text[: text.index(stop)]
    one_rank.wait_for_metric("vllm:num_requests_running", lambda value: value == 0)


def test_the_parsers_read_what_is_written_for_them(python: Path) -> None:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3")
    with (
        PythonFrontend(python, MODEL, extra_args=flags) as frontend,
        serving(frontend, *reasoning_checks.ENGINE_FLAGS) as stack,
    ):
        for check in reasoning_checks.CHECKS:
            check(stack)
        for calls in (tool_checks.CALLS[:1], tool_checks.CALLS):
            for stream in (False, True):
                # Without it, all that is said would be reasoning to this parser.
                tool_checks.calls_arrive(stack, calls, stream=stream, reasoning="Well.")
        tool_checks.tools_are_called_by_themselves(stack)


def test_drafts_of_a_request_are_in_its_response(python: Path) -> None:
    flags = ("--spec-tokens=3", "--acceptance-rate=1,1,0", "--per-request-spec-decode-metrics=detailed")
    with PythonFrontend(python, MODEL) as frontend, serving(frontend, *flags) as stack:
        asked = {"model": MODEL_NAME, "prompt": checks.PROMPT, "max_tokens": 31}
        response = httpx.post(f"{stack.url}/v1/completions", json=asked, timeout=20)
        assert response.status_code == 200, response.text
        told = response.json()["metrics"]["speculative_decoding"]
        assert (told["acceptance_histogram"], told["num_draft_tokens"]) == ([0, 0, 10, 0], 30)
        assert (told["per_step_accepted"], told["per_step_drafted"]) == ([2] * 10, [3] * 10)
        checks.streamed_chat(stack)
        checks.health_and_models(stack)


def test_four_ranks_and_four_api_servers_share_the_work(four_ranks: Stack) -> None:
    ready = four_ranks.engine.wait_for("engine ready")
    assert (ready["clients"], ready["coordinator"], ready["engines"]) == (4, True, [0, 1, 2, 3])
    checks.many_streams_at_once(four_ranks)
    checks.metrics_count_exactly(four_ranks)
    checks.many_requests_are_shared_evenly(four_ranks, 4)
    assert {entry["client"] for entry in four_ranks.engine.logged("request started")} == {0, 1, 2, 3}


def test_usage_tells_what_was_cached(four_ranks: Stack) -> None:
    count_checks.usage_tells_what_was_cached(four_ranks)


def test_a_python_supervisor_with_a_rust_worker(python: Path) -> None:
    rust = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust_frontend(DEFAULT_VERSION))}
    with (
        PythonFrontend(python, MODEL, data_parallel_size=2, env=rust) as frontend,
        serving(frontend, "--engine-count=2") as stack,
    ):
        checks.many_requests_are_shared_evenly(stack, 2)
        checks.streamed_chat(stack)


def test_mixture_of_experts_explains_the_hash_it_wants_and_serves_with_it(python: Path) -> None:
    with PythonFrontend(python, MOE_MODEL, data_parallel_size=2, api_server_count=1) as refusing:
        flags = (f"--handshake-address={refusing.handshake_address}", "--engine-count=2", "--rejoin-grace-s=0.2")
        with EngineProcess(*flags) as engine:
            refusing.wait(deadline_s=180)
            assert "PARALLEL_CONFIG_HASH" in _hint_about_the_hash(engine)
        expected = re.search(r"Expected hash: ([0-9a-f]{64})", refusing.output)
        assert expected is not None, refusing.tail
    with (
        PythonFrontend(python, MOE_MODEL, data_parallel_size=2, api_server_count=1) as frontend,
        serving(frontend, "--engine-count=2", f"--parallel-config-hash={expected[1]}") as stack,
    ):
        for _ in range(3):
            checks.completion(stack)
        checks.many_streams_at_once(stack)
        assert {entry["engine"] for entry in stack.engine.logged("request started")} == {0, 1}


def _hint_about_the_hash(engine: EngineProcess) -> str:
    hints = wait_until(
        lambda: [entry["hint"] for entry in engine.log if "hint" in entry and "hash" in entry["hint"].lower()],
        bool,
        "hints about the hash",
    )
    return str(hints[0])


def test_every_stream_ends_when_the_engine_leaves_and_the_frontend_exits(python: Path) -> None:
    # At a pace: without one the engine has said everything before the last of the streams has begun.
    with PythonFrontend(python, MODEL) as frontend, serving(frontend, "--itl-ms=20") as stack:
        checks.every_stream_ends_when_the_engine_leaves(stack)
        # The notice makes it exit, with 0: a supervisor must restart it whatever its exit code.
        assert frontend.wait(deadline_s=30) == 0


def test_engine_survives_a_restart_of_the_frontend(python: Path) -> None:
    with PythonFrontend(python, MODEL) as first:
        port = first.handshake_port
        with EngineProcess(f"--handshake-address={first.handshake_address}") as engine:
            first.wait_healthy()
            first.stop(deadline_s=30)
            engine.wait_for("frontend lost")
            with PythonFrontend(python, MODEL, handshake_port=port) as second:
                second.wait_healthy()
                checks.completion(Stack(second, engine))
            assert "Traceback" not in engine.output
