# SPDX-License-Identifier: Apache-2.0
"""Embeddings, classes and scores, as clients of the real Python frontend get them. Each start serves many tests."""

import asyncio
import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mockengine.testing.frontends import PythonFrontend
from tests.support.examples import run_example
from tests.support.python_frontend import python_frontend
from tests.support.stack import MODEL, MODEL_NAME, Stack, serving

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]

DIM = 128
QUERY = "how do red apples taste"
DOCUMENTS = [
    "the train to the coast is late again",
    "green apples are sour",
    "fresh red apples taste sweet",
]
LABELS = {0: "bad", 1: "fair", 2: "good"}


@pytest.fixture(scope="module")
def python() -> Path:
    return python_frontend(report=print)


@pytest.fixture(scope="module")
def embedding(python: Path) -> Iterator[Stack]:
    """The bundled model as one for embeddings, which may be shortened."""
    arguments = ("--runner", "pooling", "--convert", "embed", "--hf-overrides", '{"is_matryoshka": true}')
    flags = ("--supported-tasks=embed,token_embed", f"--embedding-dim={DIM}", "--load-model=vllm")
    with PythonFrontend(python, MODEL, extra_args=arguments) as frontend, serving(frontend, *flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def classifying(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model of three labels, with the bundled one's tokenizer."""
    folder = tmp_path_factory.mktemp("classifier")
    for file in MODEL.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    config = json.loads((MODEL / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": LABELS,
        "label2id": {name: number for number, name in LABELS.items()},
    }
    (folder / "config.json").write_text(json.dumps(config))
    flags = ("--supported-tasks=classify,token_classify", "--num-labels=3")
    with (
        PythonFrontend(python, folder, extra_args=("--runner", "pooling")) as frontend,
        serving(frontend, *flags) as stack,
    ):
        yield stack


def embed(stack: Stack, given: Any, **asked: Any) -> Any:
    """Return the embeddings of one or more inputs, a row for each."""
    made = stack.client().embeddings.create(model=MODEL_NAME, input=given, **asked)
    assert [each.index for each in made.data] == list(range(len(made.data)))
    return np.array([each.embedding for each in made.data], np.float32)


def post(stack: Stack, path: str, **asked: Any) -> Any:
    response = httpx.post(f"{stack.url}{path}", json={"model": MODEL_NAME, **asked}, timeout=20)
    assert response.status_code == 200, response.text
    return response.json()


def test_equal_inputs_have_equal_vectors_of_length_one(embedding: Stack) -> None:
    rows = embed(embedding, [QUERY, DOCUMENTS[0], QUERY])
    assert rows.shape == (3, DIM)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    assert np.array_equal(rows[0], rows[2])
    assert np.array_equal(rows[0], embed(embedding, QUERY)[0])
    assert not np.array_equal(rows[0], rows[1])


def test_a_cosine_ranks_by_shared_words(embedding: Stack) -> None:
    query, *documents = embed(embedding, [QUERY, *DOCUMENTS])
    cosines = [float(query @ document) for document in documents]
    assert cosines == sorted(cosines)
    assert cosines[0] < 0.3 < cosines[2]


def test_the_example_of_the_docs_runs(embedding: Stack) -> None:
    run_example(embedding, "Embeddings, classes and scores")


def test_base64_holds_the_same_numbers(embedding: Stack) -> None:
    in_base64 = post(embedding, "/v1/embeddings", input=QUERY, encoding_format="base64")["data"][0]["embedding"]
    as_numbers = post(embedding, "/v1/embeddings", input=QUERY, encoding_format="float")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(in_base64), "<f4") == pytest.approx(np.array(as_numbers), abs=1e-7)


def test_tokens_are_as_good_as_text(embedding: Stack) -> None:
    tokens = post(embedding, "/tokenize", prompt=QUERY)["tokens"]
    assert np.array_equal(embed(embedding, [tokens])[0], embed(embedding, QUERY)[0])


def test_fewer_dimensions_are_the_leading_ones(embedding: Stack) -> None:
    whole, cut = embed(embedding, QUERY)[0][:32], embed(embedding, QUERY, dimensions=32)[0]
    assert cut == pytest.approx(whole / np.linalg.norm(whole), abs=1e-5)


def test_usage_and_metrics_count_prompts(embedding: Stack) -> None:
    def counted() -> list[float]:
        names: tuple[tuple[str, dict[str, str]], ...] = (
            ("vllm:prompt_tokens_total", {}),
            ("vllm:request_success_total", {"finished_reason": "stop"}),
        )
        return [embedding.metric(name, **labels) for name, labels in names]

    before = counted()
    made = embedding.client().embeddings.create(model=MODEL_NAME, input=[QUERY, *DOCUMENTS])
    length = sum(len(post(embedding, "/tokenize", prompt=text)["tokens"]) for text in (QUERY, *DOCUMENTS))
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (length, length)
    embedding.wait_for_metric("vllm:num_requests_running", lambda value: value == 0)
    assert [after - was for after, was in zip(counted(), before, strict=True)] == [length, 4]


def test_scores_are_cosines(embedding: Stack) -> None:
    query, *documents = embed(embedding, [QUERY, *DOCUMENTS])
    for path in ("/score", "/v1/score"):
        scored = post(embedding, path, text_1=QUERY, text_2=DOCUMENTS)["data"]
        assert [each["score"] for each in scored] == pytest.approx([query @ row for row in documents], abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(embedding: Stack, path: str) -> None:
    ranked = post(embedding, path, query=QUERY, documents=DOCUMENTS)["results"]
    assert [each["index"] for each in ranked] == [2, 1, 0]
    assert [each["index"] for each in post(embedding, path, query=QUERY, documents=DOCUMENTS, top_n=1)["results"]] == [
        2
    ]


def test_pooling_says_what_embeddings_say(embedding: Stack) -> None:
    assert post(embedding, "/pooling", input=QUERY)["data"][0]["data"] == pytest.approx(
        embed(embedding, QUERY)[0].tolist(), abs=1e-6
    )


def test_a_long_text_is_computed_in_chunks_beside_short_ones(embedding: Stack) -> None:
    long = [1_000 + number % 20_000 for number in range(30_000)]
    rows = embed(embedding, [[5, 6], long, [7, 8]])
    assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(3), abs=1e-5)


def test_many_at_once_get_their_own(embedding: Stack) -> None:
    async def ask_all() -> list[Any]:
        texts = [f"text of number {number}" for number in range(100)]
        async with embedding.async_client() as client:
            return await asyncio.gather(*(client.embeddings.create(model=MODEL_NAME, input=text) for text in texts))

    rows = [tuple(made.data[0].embedding) for made in asyncio.run(ask_all())]
    assert len(set(rows)) == 100


def test_what_the_engine_refuses_costs_its_request_alone(embedding: Stack) -> None:
    # More than the engine has, fewer than the model.
    asked = {"model": MODEL_NAME, "input": QUERY, "dimensions": DIM + 1}
    response = httpx.post(f"{embedding.url}/v1/embeddings", json=asked, timeout=20)
    refused = embedding.engine.wait_for("request refused")
    assert refused["reason"] == "dimensions: 129 where embedding_dim of this engine allows 1 to 128"
    # 0.32 knows no errors of the engine, and takes the tensor without numbers for the answer.
    assert response.json()["data"][0]["embedding"] == []
    assert embed(embedding, QUERY).shape == (1, DIM)


def test_there_are_no_other_routes(embedding: Stack) -> None:
    for path in ("/classify", "/v1/completions", "/v1/chat/completions"):
        assert httpx.post(f"{embedding.url}{path}", json={}, timeout=20).status_code == 404
    assert embedding.get("/health").status_code == 200


def test_classes_are_probabilities_of_the_models_labels(classifying: Stack) -> None:
    found = post(classifying, "/classify", input=[QUERY, *DOCUMENTS, QUERY])["data"]
    for each in found:
        assert each["num_classes"] == 3
        assert sum(each["probs"]) == pytest.approx(1, abs=1e-5)
        assert each["label"] == LABELS[int(np.argmax(each["probs"]))]
    assert found[0]["probs"] == found[-1]["probs"]
    (logits,) = post(classifying, "/classify", input=QUERY, use_activation=False)["data"]
    likely = np.exp(logits["probs"]) / np.exp(logits["probs"]).sum()
    assert likely == pytest.approx(np.array(found[0]["probs"]), abs=1e-5)


def test_texts_fall_into_all_classes(classifying: Stack) -> None:
    words = sorted({word for text in (QUERY, *DOCUMENTS) for word in text.split()})
    found = post(classifying, "/classify", input=words)
    assert {each["label"] for each in found["data"]} == set(LABELS.values())
    assert classifying.get("/health").status_code == 200
    assert classifying.engine.logged("request refused") == []
