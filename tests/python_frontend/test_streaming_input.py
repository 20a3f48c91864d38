# SPDX-License-Identifier: Apache-2.0
"""Streaming-input sessions from vLLM's own client of the engine, `AsyncLLM`: what its realtime routes are made of.

These routes want a speech model, so what is beneath them is driven directly, by a script that runs in the frontend's
environment. It sends what else no route of this release lets through: traces to be replayed, and headers to be echoed.
"""

import json
import os
import subprocess
from typing import Any

import pytest

from mockengine.testing.engine import EngineProcess
from mockengine.testing.processes import free_port
from tests.support.python_frontend import python_frontend
from tests.support.stack import MODEL, wait_until

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
TRACE = [300, 2, 0, 300, 31_999]
SCRIPT = f"""
import asyncio, json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

def params(max_tokens, **more):
    return SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, **more)

async def inputs(gap_s, count=3):
    for number in range(count):
        prompt = {{"prompt_token_ids": [300 + number] * (20 + number)}}
        yield StreamingInput(prompt=prompt, sampling_params=params(2) if number == 1 else None)
        await asyncio.sleep(gap_s)

async def said(llm, name, prompt, asked, **more):
    tokens = []
    async for output in llm.generate(prompt=prompt, sampling_params=asked, request_id=name, **more):
        # Outputs that wait to be taken are merged, those of several turns too.
        tokens += output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "length"
    return tokens

async def given_up(llm):
    first = asyncio.Event()
    async def one():
        async for output in llm.generate(prompt=inputs(1000), sampling_params=params(5), request_id="given up"):
            first.set()
    task = asyncio.create_task(one())
    await first.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

async def main(model, port):
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=model, data_parallel_size_local=0, data_parallel_address="127.0.0.1", data_parallel_rpc_port=port))
    # Checks that want a GPU and a collector of traces; what they guard is the engine's business.
    llm.model_config.enable_trace_replay = True
    llm.observability_config.otlp_traces_endpoint = "http://127.0.0.1:9"
    echoed, process = [], llm.output_processor.process_outputs
    def listen(outputs, *args, **kwargs):
        echoed.extend([output.request_id.rsplit("-", 1)[0], output.trace_headers] for output in outputs)
        return process(outputs, *args, **kwargs)
    llm.output_processor.process_outputs = listen
    result = {{}}
    result["early"], result["late"] = await asyncio.gather(
        said(llm, "early", inputs(0), params(5)), said(llm, "late", inputs(0.2), params(5)))
    await given_up(llm)
    whole = []
    for number, count in ((0, 5), (1, 2), (2, 5)):
        whole += [300 + number] * (20 + number)
        plain = await said(llm, f"plain {{number}}", {{"prompt_token_ids": whole}}, params(count))
        result[f"plain {{number}}"] = plain
        whole += plain[:-1]
    trace = params(50, trace_decode_token_ids={TRACE})
    result["trace"] = await said(llm, "trace", {{"prompt_token_ids": [5, 6]}}, trace)
    await said(llm, "headers", {{"prompt_token_ids": [7]}}, params(3), trace_headers={HEADERS})
    result["echoed"] = [headers for name, headers in echoed if name == "headers"]
    result["unasked"] = [headers for name, headers in echoed if name != "headers" and headers is not None]
    print("RESULT", json.dumps(result))
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(scope="module", params=["off", "vllm"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script heard of an engine."""
    python, script, port = python_frontend(report=print), tmp_path_factory.mktemp("script") / "script.py", free_port()
    script.write_text(SCRIPT)
    foreign = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in foreign} | {"HF_HUB_OFFLINE": "1"}
    with EngineProcess(f"--handshake-address=tcp://127.0.0.1:{port}", f"--load-model={request.param}") as engine:
        command = [str(python), str(script), str(MODEL), str(port)]
        ran = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False
        )
        lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, ran.stdout[-4_000:]
        wait_until(lambda: engine.logged("frontend lost"), bool, "the frontend's end")
        assert engine.logged("frontend lost")[0]["requests_dropped"] == 0
        assert "Traceback" not in engine.output
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def test_turns_say_what_plain_requests_of_the_whole_prompt_hear(said: dict[str, Any]) -> None:
    expected = [said[f"plain {number}"] for number in range(3)]
    assert [len(tokens) for tokens in expected] == [5, 2, 5]
    assert said["early"] == said["late"] == [token for tokens in expected for token in tokens]


def test_a_trace_is_said_as_it_is(said: dict[str, Any]) -> None:
    assert said["trace"] == TRACE


def test_trace_headers_are_echoed_with_the_first_output_and_the_last(said: dict[str, Any]) -> None:
    assert said["echoed"] == [HEADERS, None, HEADERS]
    assert said["unasked"] == []
