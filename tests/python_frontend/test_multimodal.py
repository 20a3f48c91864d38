# SPDX-License-Identifier: Apache-2.0
"""Images and embeddings through the real Python frontend, which leaves out the data of an image that it has sent once.

Its first request for an image brings the data, later ones the hash alone; so it believes until a cache miss tells it
otherwise.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mockengine.testing.frontends import PythonFrontend
from tests.support import image_checks
from tests.support.image_checks import BLUE, GREEN, RED
from tests.support.python_frontend import python_frontend, torchvision_beside
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving
from tests.support.vision_model import make_vision_model

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]

WIDTH = 256
EMBEDDINGS = f"""
import base64, io, torch
for rows in (3, 5):
    file = io.BytesIO()
    torch.save(torch.arange(rows * {WIDTH}, dtype=torch.float32).reshape(rows, {WIDTH}), file)
    print(base64.b64encode(file.getvalue()).decode())
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_frontend(report=print)


@pytest.fixture(scope="module")
def stack(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = make_vision_model(tmp_path_factory.mktemp("models") / "vision")
    env = {"PYTHONPATH": str(torchvision_beside(python)), "VLLM_SERVER_DEV_MODE": "1"}
    flags = ("--load-model=vllm", "--mm-cache-items=2")
    with PythonFrontend(python, folder, env=env) as frontend, serving(frontend, *flags) as stack:
        yield stack


@pytest.mark.parametrize(
    "check",
    [
        image_checks.an_image_is_answered_and_counted,
        image_checks.the_same_image_is_answered_alike_and_another_one_is_not,
        image_checks.blocks_of_an_image_are_hit_by_the_same_image_alone,
    ],
    ids=lambda check: check.__name__,
)
def test_images(stack: Stack, check: Callable[[Stack], None]) -> None:
    # Both sides forget what the test before has sent.
    assert httpx.post(f"{stack.url}/reset_mm_cache", timeout=20).status_code == 200
    check(stack)


def test_what_the_engine_has_forgotten_is_a_miss_and_is_sent_again(stack: Stack) -> None:
    assert httpx.post(f"{stack.url}/reset_mm_cache", timeout=20).status_code == 200
    said = {colour: image_checks.tokens(stack, colour) for colour in (RED, GREEN, BLUE)}
    # The engine remembers two.
    missed = image_checks.post(stack, RED)
    # 0.33 knows the text of the error, and that it may be asked again.
    assert missed.status_code == 500, missed.text
    refused = stack.engine.logged("request refused")[-1]
    assert "cache miss: the engine does not hold the data of 1 of 1 multimodal items" in refused["reason"]
    assert image_checks.tokens(stack, RED) == said[RED]
    assert image_checks.tokens(stack, BLUE) == said[BLUE]
    assert stack.get("/health").status_code == 200


def test_a_prompt_of_embeddings_is_answered_and_counted(python: Path) -> None:
    made = subprocess.run([str(python), "-c", EMBEDDINGS], check=True, capture_output=True, text=True).stdout.split()
    flags = ("--load-model=vllm", "--tokenizer", str(MODEL))
    frontend = PythonFrontend(python, MODEL, extra_args=("--enable-prompt-embeds",))
    with frontend, serving(frontend, *flags) as stack:

        def ask(embeds: str | list[str], **asked: Any) -> Any:
            body = {"model": MODEL_NAME, "prompt_embeds": embeds, "max_tokens": 6, "return_token_ids": True, **asked}
            response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=20)
            assert response.status_code == 200, response.text
            return response.json()

        first, second = made
        reply = ask(first)
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 6)
        tokens = reply["choices"][0]["token_ids"]
        assert ask(first)["choices"][0]["token_ids"] == tokens
        both = ask([first, second])
        assert both["usage"]["prompt_tokens"] == 8
        assert [choice["token_ids"] == tokens for choice in both["choices"]] == [True, False]
        assert len(ask(first, structured_outputs={"regex": "[ab]{3}"})["choices"][0]["text"]) == 3
        assert stack.get("/health").status_code == 200
