# SPDX-License-Identifier: Apache-2.0
"""What every frontend must do with the engine behind it. One function per behaviour, for any stack."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import openai
from openai.types.chat import ChatCompletionMessageParam

from mockengine.testing.double import FrontendDouble
from mockengine.testing.engine import EngineProcess
from tests.support.stack import MODEL_NAME, Stack, wait_until

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]
PROMPT = "Hello there, how are you?"


def health_and_models(stack: Stack) -> None:
    assert stack.get("/health").status_code == 200
    models = stack.client().models.list().data
    assert [model.id for model in models] == [MODEL_NAME]
    assert models[0].model_dump()["max_model_len"] == 32_768


def completion(stack: Stack) -> None:
    reply = stack.client().completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=7)
    assert reply.choices[0].finish_reason == "length"
    assert len(reply.choices[0].text.split()) >= 3
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 7


def streamed_completion(stack: Stack) -> None:
    whole = stack.client().completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=7)
    stream = stack.client().completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage


def chat(stack: Stack) -> None:
    reply = stack.client().chat.completions.create(model=MODEL_NAME, messages=QUESTION, max_tokens=9)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 9
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 9


def streamed_chat(stack: Stack) -> None:
    completions = stack.client().chat.completions
    whole = completions.create(model=MODEL_NAME, messages=QUESTION, max_tokens=9)
    stream = completions.create(
        model=MODEL_NAME, messages=QUESTION, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def drafts_are_counted(stack: Stack) -> None:
    """Check a stack whose engine accepts two of three drafts, always."""
    names = [f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    text = stack.client().completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=31).choices[0].text
    assert len(text.split()) > 10
    # One token with the prompt, three with each output after it.
    wait_until(lambda: [stack.metric(name) for name in names], [10, 30, 20].__eq__, "drafts")
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [stack.metric(per_pos, position=place) for place in "012"] == [10, 10, 0]
    assert stack.metric("vllm:generation_tokens_total") == 31


def same_prompt_gives_the_same_text(stack: Stack) -> None:
    texts = {
        stack.client().completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=20).choices[0].text
        for _ in range(3)
    }
    assert len(texts) == 1
    other = stack.client().completions.create(model=MODEL_NAME, prompt=PROMPT + "!", max_tokens=20)
    assert other.choices[0].text not in texts


def same_prompt_gives_the_same_tokens_as_on_the_double(stack: Stack) -> None:
    body = {"model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 12, "return_token_ids": True}
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=20).json()
    with FrontendDouble() as double, EngineProcess(f"--handshake-address={double.handshake_address}"):
        double.handshake()
        # What frontends say of the model's EOS.
        double.add("r1", prompt=[5, 6, 7], max_tokens=12, sampling={"_all_stop_token_ids": [0, 2]})
        assert double.reply("r1").tokens == reply["choices"][0]["token_ids"]


def reply_without_max_tokens_ends_by_itself(stack: Stack) -> None:
    reply = stack.client().chat.completions.create(model=MODEL_NAME, messages=QUESTION)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 256


def disconnected_client_frees_its_request(stack: Stack) -> None:
    body = {"model": MODEL_NAME, "messages": QUESTION, "max_tokens": 30_000, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        wait_until(lambda: len(stack.engine.logged("request started")), lambda count: count > 0, "started requests")
    aborted = stack.engine.wait_for("request finished", lambda entry: entry["finish_reason"] == "abort")
    assert 0 < aborted["output_tokens"] < 30_000
    stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 0)


def logprobs_are_said(stack: Stack) -> None:
    reply = stack.client().completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=5, logprobs=2)
    scores = reply.choices[0].logprobs
    assert scores is not None
    assert len(scores.top_logprobs or ()) == 5
    assert all(logprob <= 0 for logprob in scores.token_logprobs or (1.0,))
    chat = stack.client().chat.completions.create(
        model=MODEL_NAME, messages=QUESTION, max_tokens=5, logprobs=True, top_logprobs=2, stream=True
    )
    said = [each for chunk in chat if (scores_of := chunk.choices[0].logprobs) for each in scores_of.content or ()]
    assert len(said) == 5
    assert all(2 <= len(each.top_logprobs) <= 3 for each in said)


def many_streams_at_once(stack: Stack) -> None:
    streams, tokens = 200, 32

    async def one(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.completions.create(
            model=MODEL_NAME,
            prompt=f"{PROMPT} {number}",
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
        return usages[-1].completion_tokens

    async def everyone() -> list[int]:
        async with stack.async_client() as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(streams))))

    assert asyncio.run(everyone()) == [tokens] * streams
    stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 0)


def many_requests_are_shared_evenly(stack: Stack, ranks: int) -> None:
    """2000 short requests, 64 at a time: every rank gets its share, and each request ends once."""
    requests, at_once = 2_000, 64
    before = len(stack.engine.logged("request started"))

    async def some(client: openai.AsyncOpenAI, numbers: Iterator[int]) -> None:
        for number in numbers:
            reply = await client.completions.create(model=MODEL_NAME, prompt=f"{PROMPT} {number}", max_tokens=2)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 2

    async def everyone() -> None:
        numbers = iter(range(requests))
        async with stack.async_client() as client:
            await asyncio.gather(*(some(client, numbers) for _ in range(at_once)))

    asyncio.run(everyone())
    wait_until(lambda: len(stack.engine.logged("request finished")), (before + requests).__eq__, "requests that ended")
    started = stack.engine.logged("request started")[before:]
    finished = stack.engine.logged("request finished")[before:]
    assert Counter(each["request_id"] for each in finished) == Counter(each["request_id"] for each in started)
    assert len({each["request_id"] for each in started}) == requests
    shares = Counter(entry["engine"] for entry in started)
    assert len(shares) == ranks
    assert all(abs(share - requests / ranks) < 0.2 * requests / ranks for share in shares.values()), shares
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        stack.wait_for_metric(name, (0.0).__eq__)


def metrics_count_exactly(stack: Stack) -> None:
    """Needs a line whose layout is known for certain, for the prompt tokens."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [stack.metric(name) for name in names]
    queued_before = stack.metric("vllm:request_queue_time_seconds_count")
    expected = [0.0, 0.0]
    for tokens in (1, 5, 17):
        usage = stack.client().completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=tokens).usage
        assert usage is not None
        expected[0] += usage.prompt_tokens
        expected[1] += tokens
    wait_until(
        lambda: [stack.metric(name) - start for name, start in zip(names, before, strict=True)],
        lambda counted: counted == expected,
        "counted tokens",
    )
    assert stack.metric("vllm:request_queue_time_seconds_count") == queued_before + 3
    assert 0 < stack.metric("vllm:request_queue_time_seconds_sum") / (queued_before + 3) < 1
    stack.wait_for_metric("vllm:num_requests_running", lambda value: value == 0)
    assert stack.metric("vllm:num_requests_waiting") == 0


BASIC: list[Callable[[Stack], None]] = [
    health_and_models,
    completion,
    streamed_completion,
    chat,
    streamed_chat,
    same_prompt_gives_the_same_text,
    reply_without_max_tokens_ends_by_itself,
    logprobs_are_said,
    disconnected_client_frees_its_request,
]
"""What the oldest frontend here does as well as the newest."""


def every_stream_ends_when_the_engine_leaves(stack: Stack) -> None:
    """Stops the engine; the stack serves nothing after."""
    streams = 20

    async def one(started: asyncio.Semaphore) -> str:
        """Return how the stream ended."""
        body = {"model": MODEL_NAME, "messages": QUESTION, "max_tokens": 30_000, "stream": True}
        ended = "closed"
        async with httpx.AsyncClient(timeout=30) as client:
            with contextlib.suppress(httpx.HTTPError):
                async with client.stream("POST", f"{stack.url}/v1/chat/completions", json=body) as response:
                    lines = response.aiter_lines()
                    await anext(lines)
                    started.release()
                    async for line in lines:
                        ended = line or ended
        return ended

    async def everyone() -> list[str]:
        started = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(one(started)) for _ in range(streams)]
        for _ in range(streams):
            await asyncio.wait_for(started.acquire(), 30)
        stack.engine.process.terminate()
        return await asyncio.wait_for(asyncio.gather(*tasks), 30)

    assert len(asyncio.run(everyone())) == streams
    assert stack.engine.wait() == 0
