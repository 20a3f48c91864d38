# SPDX-License-Identifier: Apache-2.0
"""The public suite of JSON schemas through a real Rust frontend: a document that conforms, or status 400."""

import gzip
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import jsonschema
import pytest

from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from tests.support.docs import REPLIES
from tests.support.stack import MODEL, MODEL_NAME, ROOT, Stack, serving

pytestmark = pytest.mark.rust_frontend

SUITE = ROOT / "tests" / "fixtures" / "json_schema_suite.json.gz"


def test_every_schema_is_kept_to_or_refused() -> None:
    schemas = [case["schema"] for case in json.loads(gzip.decompress(SUITE.read_bytes()))["schemas"]]
    with (
        RustFrontend(rust_frontend(DEFAULT_VERSION), MODEL) as frontend,
        serving(frontend, f"--tokenizer={MODEL}") as stack,
        ThreadPoolExecutor(8) as clients,
    ):
        counts = Counter(clients.map(partial(_outcome, stack), schemas))
        assert stack.get("/health").status_code == 200
    said = f"the Rust frontend {counts['conforming']} clients get such replies and {counts['refused']} status 400"
    assert set(counts) == {"conforming", "refused"}
    assert said in " ".join(REPLIES.read_text(encoding="utf-8").split())


def _outcome(stack: Stack, schema: Any) -> str:
    wanted = {"type": "json_schema", "json_schema": {"name": "suite", "schema": schema}}
    messages = [{"role": "user", "content": "A document, please."}]
    body = {"model": MODEL_NAME, "max_tokens": 300, "messages": messages, "response_format": wanted}
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)
    if response.status_code != httpx.codes.OK:
        return "refused" if response.status_code == httpx.codes.BAD_REQUEST else response.text
    (choice,) = response.json()["choices"]
    document = json.loads(choice["message"]["content"])
    conforms = jsonschema.Draft202012Validator(schema).is_valid(document)
    return "conforming" if conforms and choice["finish_reason"] == "stop" else f"{document} for {schema}"
