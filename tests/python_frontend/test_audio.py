# SPDX-License-Identifier: Apache-2.0
"""Sounds through vLLM's own client of the engine, `AsyncLLM`, which prepares them as its HTTP routes do.

Those routes read files of sound with packages that the frontend's environment does not have, so waves are given as they
are, by a script that runs there.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mockengine.testing.engine import EngineProcess
from mockengine.testing.processes import free_port
from tests.support.audio_model import PLACEHOLDER, SAMPLES_PER_S, make_audio_model
from tests.support.python_frontend import python_frontend

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]

SCRIPT = f"""
import asyncio, json, sys
import numpy as np
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

async def main(model, port):
    args = dict(data_parallel_size_local=0, data_parallel_address="127.0.0.1", data_parallel_rpc_port=int(port))
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **args))
    params = SamplingParams(max_tokens=5, output_kind=RequestOutputKind.FINAL_ONLY)
    for name, hertz, seconds in (("a", 440, 1), ("again", 440, 1), ("other", 880, 1), ("long", 440, 2)):
        wave = np.sin(np.arange(seconds * {SAMPLES_PER_S}) * (2 * np.pi * hertz / {SAMPLES_PER_S}), dtype=np.float32)
        prompt = {{
            "prompt": "<|audio_bos|>{PLACEHOLDER}<|audio_eos|>What is it?",
            "multi_modal_data": {{"audio": [(wave, {SAMPLES_PER_S})]}},
        }}
        async for output in llm.generate(prompt=prompt, sampling_params=params, request_id=name):
            said = output.outputs[0]
        print(json.dumps([len(output.prompt_token_ids), said.token_ids, said.finish_reason]))
    llm.shutdown()

asyncio.run(main(*sys.argv[1:]))
"""


def _said_of_sounds(folder: Path, port: int) -> list[Any]:
    """Return tokens of the prompt, what is said and why it ends, of each of the script's sounds."""
    done = subprocess.run(
        [python_frontend(report=print), "-c", SCRIPT, str(folder), str(port)],
        capture_output=True,
        text=True,
        check=False,
        # What this interpreter was told is not meant for another one.
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_sounds_are_answered_each_in_its_own_way(tmp_path: Path) -> None:
    port = free_port()
    with EngineProcess(f"--handshake-address=tcp://127.0.0.1:{port}", "--load-model=vllm") as engine:
        first, again, other, longer = _said_of_sounds(make_audio_model(tmp_path / "audio"), port)
        assert "Traceback" not in engine.output
    assert first == again
    assert (first[0], len(first[1]), first[2]) == (other[0], 5, "length")
    assert first[1] != other[1], "other sounds, other words"
    assert longer[0] == first[0] + 25, "a token for 40 ms"
