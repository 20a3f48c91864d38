# SPDX-License-Identifier: Apache-2.0
"""What a frontend's `/metrics` must say of an engine under load. One function per behaviour, for any frontend.

What clients measure is held against what the frontend says, not against the clock: a slow machine delays both.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from mockengine.engine.drafts import Acceptance
from mockengine.replies.key import SeedScope, reply_key
from tests.support.load import BLOCK_TOKENS, Histogram, Metrics, Rank, Timed, http_client
from tests.support.rig import request

STEP_S = 0.1
SLOTS = 5
PACED_TTFT_S = 0.5
PACED_ITL_S = 0.00468
_PACED_PROMPT = 10
_PRESSED_STEP_MS = 5
_PRESSED_SLOTS = 8
CHUNKS = (1, 4, 8)
_RATES = (0.8, 0.6, 0.3)

ENGINES: dict[str, Sequence[str]] = {
    "slots": (f"--max-num-seqs={SLOTS}", "--timing=step", f"--step-base-ms={STEP_S}s"),
    "pressed": (f"--max-num-seqs={_PRESSED_SLOTS}", "--timing=step", f"--step-base-ms={_PRESSED_STEP_MS}"),
    "paced": (
        "--timing=step",
        f"--step-base-ms={PACED_ITL_S}s",
        f"--step-ms-per-prefill-token={(PACED_TTFT_S - PACED_ITL_S) / _PACED_PROMPT}s",
    ),
    **{f"chunks of {size}": (f"--output-token-chunk-size={size}",) for size in CHUNKS},
    "drafts": (
        *(f"--spec-tokens={len(_RATES)}", f"--acceptance-rate={','.join(map(str, _RATES))}"),
        *("--timing=step", "--step-base-ms=4"),
    ),
}
"""The engines that the checks need, by the flags that tell them apart."""

_TTFT = "vllm:time_to_first_token_seconds"
_QUEUE = "vllm:request_queue_time_seconds"
_PREFILL = "vllm:request_prefill_time_seconds"
_ITERATION = "vllm:iteration_tokens_total"
_ITL = "vllm:inter_token_latency_seconds"
_DRAFTED = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
_COUNTED = (
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
)

Fleet = Mapping[str, Rank]


# Waiting for a slot.


def first_token_times_are_those_that_clients_measure(fleet: Fleet) -> None:
    rank, requests = fleet["slots"], 100
    before = rank.metrics()
    replies, at_work = asyncio.run(_crowd(rank, requests))
    assert at_work.running == SLOTS
    after = _ended(rank, before, requests)
    _first_tokens_come_in_rounds(replies)
    said = {name: after.histogram(name).since(before.histogram(name)) for name in (_TTFT, _QUEUE, _PREFILL)}
    _agree(said[_TTFT], [reply.ttft_s for reply in replies])
    # A prefill is one step here; all that a first token took besides was waiting.
    assert said[_PREFILL].mean >= STEP_S
    assert said[_PREFILL].mean < 2 * STEP_S
    assert said[_QUEUE].total + said[_PREFILL].total <= said[_TTFT].total
    assert said[_QUEUE].total > 3 * said[_PREFILL].total


async def _crowd(rank: Rank, requests: int) -> tuple[list[Timed], Metrics]:
    """Send all at once; return what the clients saw, and the metrics of a moment with most of them waiting."""
    async with http_client() as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(rank.stream(client, [number + 1] * 8, 1)) for number in range(requests)]
        at_work = await rank.soon(lambda said: said.running > 0 and said.waiting > requests / 2, "a crowd that waits")
    return [task.result() for task in tasks], at_work


def _first_tokens_come_in_rounds(replies: Sequence[Timed]) -> None:
    """Check that no first token came earlier than a free slot and a step after it allow."""
    begin = min(reply.sent_s for reply in replies)
    for number, moment in enumerate(sorted(reply.first_s for reply in replies)):
        assert moment - begin >= (number // SLOTS + 1) * STEP_S


def _agree(said: Histogram, measured: Sequence[float]) -> None:
    """Check that a frontend's times are the clients', who see each a little later than it."""
    assert said.count == len(measured)
    assert 0.75 * sum(measured) < said.total <= sum(measured)
    # Who comes last is seen latest: all come at once.
    slack_s = 2 * STEP_S + 3 * (sum(measured) - said.total) / said.count
    for bound, count in said.up_to.items():
        assert sum(time <= bound for time in measured) <= count
        assert sum(time <= bound + slack_s for time in measured) >= count


def more_than_the_capacity_waits(fleet: Fleet) -> None:
    rank, capacity = fleet["slots"], SLOTS / STEP_S
    below, _ = _offered(rank, capacity / 2, requests=20)
    # All at once: a busy machine may not get them off at a rate.
    above, served_per_s = _offered(rank, math.inf, requests=60)
    # Who comes during a step waits for its end.
    assert below.mean < 2 * STEP_S
    assert above.mean > 2 * STEP_S
    assert above.mean > 2 * below.mean
    assert capacity / 2 < served_per_s <= capacity


def _offered(rank: Rank, per_s: float, requests: int) -> tuple[Histogram, float]:
    """Send so many requests in a second; return the times in the queue, and how many were served in a second."""

    async def everyone() -> list[Timed]:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        async with http_client() as client, asyncio.TaskGroup() as group:
            tasks = []
            for number in range(requests):
                await asyncio.sleep(begin + number / per_s - loop.time())
                tasks.append(group.create_task(rank.stream(client, [number + 1] * 8, 1)))
        return [task.result() for task in tasks]

    before = rank.metrics()
    replies = asyncio.run(everyone())
    after = _ended(rank, before, requests)
    lasted_s = max(reply.last_s for reply in replies) - min(reply.sent_s for reply in replies)
    return after.histogram(_QUEUE).since(before.histogram(_QUEUE)), requests / lasted_s


# Room in the cache, and who gives up.


def a_full_cache_preempts_and_is_empty_in_the_end(fleet: Fleet) -> None:
    rank, requests, prompt_tokens, reply_tokens = fleet["pressed"], 10, 3_300, 200
    before = rank.metrics()

    async def everyone() -> list[Timed]:
        async with http_client() as client, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(rank.stream(client, [100 + number] * prompt_tokens, reply_tokens))
                for number in range(requests)
            ]
            await rank.soon(lambda said: said.usage > 0.95 and said.running > 1 and said.waiting > 0, "a full cache")
        return [task.result() for task in tasks]

    assert [reply.tokens for reply in asyncio.run(everyone())] == [reply_tokens] * requests
    after = _ended(rank, before, requests)
    counted = _counted(before, after)
    assert counted["vllm:num_preemptions_total"] > 0
    preempted = after.histogram("vllm:request_num_preemptions").since(before.histogram("vllm:request_num_preemptions"))
    assert preempted.total == counted["vllm:num_preemptions_total"]
    # What is computed again is no prompt, no query and no hit again.
    assert counted["vllm:prompt_tokens_total"] == requests * prompt_tokens
    assert counted["vllm:prefix_cache_queries_total"] == requests * prompt_tokens
    assert counted["vllm:prefix_cache_hits_total"] == 0
    assert counted["vllm:generation_tokens_total"] == requests * reply_tokens


def aborted_requests_leave_nothing_behind(fleet: Fleet) -> None:
    rank, given_up, reply_tokens = fleet["pressed"], 2 * _PRESSED_SLOTS, 50
    before = rank.metrics()

    async def everyone() -> list[Timed]:
        async with http_client() as client, asyncio.TaskGroup() as group:
            endless = [
                asyncio.create_task(rank.stream(client, [200 + number] * 40, 20_000)) for number in range(given_up)
            ]
            await rank.soon(lambda said: (said.running, said.waiting) == (_PRESSED_SLOTS, _PRESSED_SLOTS), "a queue")
            # They come last, so they are there for as long as the others are.
            patient = [group.create_task(rank.stream(client, [300 + number] * 40, reply_tokens)) for number in range(4)]
            await rank.soon(lambda said: said.waiting == _PRESSED_SLOTS + len(patient), "a longer queue")
            for task in endless:
                task.cancel()
            ended = await asyncio.gather(*endless, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        return [task.result() for task in patient]

    assert [reply.tokens for reply in asyncio.run(everyone())] == [reply_tokens] * 4
    rank.wait_for(lambda said: said.is_idle, "gauges at 0")
    after = rank.wait_for(lambda said: _successes(said, "length") == _successes(before, "length") + 4, "endings")
    assert _counted(before, after)["vllm:num_preemptions_total"] == 0


# Tokens.


def a_repeated_prefix_hits_its_whole_blocks(fleet: Fleet) -> None:
    rank = fleet["chunks of 1"]
    # First tokens of their own, so that nothing that was cached before is hit.
    shared = list(range(1_000, 1_064))
    cases: list[tuple[list[int], int]] = [
        ([*shared, *range(36)], 0),
        ([*shared, *range(36)], 96),
        ([*shared, *range(500, 540)], 64),
        # The last token is always computed, and so its block.
        ([*shared, *range(32)], 80),
        (shared[1:], 0),
    ]
    for prompt, hits in cases:
        before = rank.metrics()
        rank.complete(prompt, 3)
        counted = _counted(before, _ended(rank, before, 1))
        assert counted == {
            "vllm:prompt_tokens_total": len(prompt),
            "vllm:prompt_tokens_cached_total": hits,
            "vllm:prefix_cache_queries_total": len(prompt),
            "vllm:prefix_cache_hits_total": hits,
            "vllm:generation_tokens_total": 3,
            "vllm:num_preemptions_total": 0,
        }


def tokens_of_iterations_add_up(fleet: Fleet) -> None:
    lengths, reply_tokens = (1, 7, 100, 8_192, 8_193, 20_000), 50
    for size in CHUNKS:
        rank = fleet[f"chunks of {size}"]
        before = rank.metrics()
        for length in lengths:
            # At once, since the longest leaves little of what was cached before.
            for _ in ("new", "repeated"):
                rank.complete([2_000 + length] * length, reply_tokens)
        after = _ended(rank, before, 2 * len(lengths))
        said = after.histogram(_ITERATION).since(before.histogram(_ITERATION))
        cached = sum((length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths)
        assert said.total == 2 * sum(lengths) - cached + 2 * len(lengths) * reply_tokens
        # Every output is an iteration, and nothing else is.
        assert said.count == 2 * len(lengths) * -(-reply_tokens // size)


# Drafts.


def outputs_have_the_accepted_drafts(fleet: Fleet) -> None:
    rank, length = fleet["drafts"], 101
    prompts = _drafted_prompts()
    before = rank.metrics()
    for prompt in prompts:
        rank.complete(prompt, length)
    after = _ended(rank, before, len(prompts))
    planned = [_planned(prompt, length) for prompt in prompts]
    outputs = sum(len(accepted) + 1 for accepted in planned)
    said = after.histogram(_ITERATION).since(before.histogram(_ITERATION))
    assert (said.count, said.total) == (outputs, sum(map(len, prompts)) + len(prompts) * length)
    assert _counted(before, after)["vllm:generation_tokens_total"] == len(prompts) * length
    between = after.histogram(_ITL).since(before.histogram(_ITL))
    assert between.count == outputs - len(prompts)


def drafts_are_counted_exactly(fleet: Fleet) -> None:
    rank, length = fleet["drafts"], 150
    prompts = [[number + 50 for number in prompt] for prompt in _drafted_prompts()]
    before = rank.metrics()
    seen = [rank.outputs(prompt, length) for prompt in prompts]
    after = _ended(rank, before, len(prompts))
    planned = [_planned(prompt, length) for prompt in prompts]
    for outputs, accepted in zip(seen, planned, strict=True):
        *others, last = (1 + count for count in accepted)
        assert outputs == [1, *others, length - 1 - sum(others)]
        assert outputs[-1] <= last
    every = [count for accepted in planned for count in accepted]
    assert {name: after.value(name) - before.value(name) for name in _DRAFTED} == {
        "vllm:spec_decode_num_drafts_total": sum(len(outputs) - 1 for outputs in seen),
        "vllm:spec_decode_num_draft_tokens_total": len(_RATES) * len(every),
        "vllm:spec_decode_num_accepted_tokens_total": sum(every),
    }
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    for place in range(len(_RATES)):
        accepted_there = after.value(per_pos, position=str(place)) - before.value(per_pos, position=str(place))
        assert accepted_there == sum(count > place for count in every)
    # A client that knows no plan sees as much, but for what the last outputs lack.
    tokens, outputs_seen = sum(map(sum, seen)), sum(map(len, seen))
    assert 0 <= sum(every) - (tokens - outputs_seen) <= len(_RATES) * len(prompts)


def _drafted_prompts() -> list[list[int]]:
    """Return prompts of which nothing is cached, and which leave more than one token to compute."""
    return [[600 + number] * 20 for number in range(6)]


def _planned(prompt: Sequence[int], length: int) -> list[int]:
    """Return how many drafts are accepted in each output of a reply of so many tokens but the first one."""
    drawn = Acceptance(_RATES).draw(reply_key(request(prompt=prompt), 0, SeedScope.PROMPT), 0, length)
    accepted, position = [], 1
    while position < length:
        accepted.append(drawn[position])
        position += 1 + drawn[position]
    return accepted


# Pace.


def one_reply_keeps_its_pace(fleet: Fleet) -> None:
    rank, tokens = fleet["paced"], 120

    async def one(number: int) -> Timed:
        async with http_client() as client:
            return await rank.stream(client, [400 + number] * _PACED_PROMPT, tokens)

    def measure(number: int) -> float:
        before = rank.metrics()
        reply = asyncio.run(one(number))
        after = _ended(rank, before, 1)
        assert PACED_TTFT_S <= after.histogram(_TTFT).since(before.histogram(_TTFT)).total <= reply.ttft_s
        return reply.tpot_s / PACED_ITL_S

    assert 0.98 <= quietest(measure) <= 1.02


def quietest(measure: Callable[[int], float], attempts: int = 3) -> float:
    """Measure a ratio that other programs can only raise, until it is as it should be or attempts have run out.

    Args:
        measure: takes the number of the attempt.
        attempts: how many there are at most.

    """
    ratios: list[float] = []
    for number in range(attempts):
        ratios.append(measure(number))
        if ratios[-1] <= 1.02:
            break
    return min(ratios)


# What all have in common.


def _ended(rank: Rank, before: Metrics, requests: int) -> Metrics:
    """Wait until so many more have ended and the gauges are at 0."""
    expected = _successes(before, "length") + requests
    return rank.wait_for(lambda said: _successes(said, "length") == expected and said.is_idle, "the end of a load")


def _successes(said: Metrics, reason: str) -> float:
    return said.value("vllm:request_success_total", finished_reason=reason)


def _counted(before: Metrics, after: Metrics) -> dict[str, float]:
    return {name: after.value(name) - before.value(name) for name in _COUNTED}


ALL: list[Callable[[Fleet], None]] = [
    first_token_times_are_those_that_clients_measure,
    more_than_the_capacity_waits,
    a_full_cache_preempts_and_is_empty_in_the_end,
    aborted_requests_leave_nothing_behind,
    a_repeated_prefix_hits_its_whole_blocks,
    tokens_of_iterations_add_up,
    outputs_have_the_accepted_drafts,
    one_reply_keeps_its_pace,
]
# A Python frontend has series about drafts only where it was given a speculative configuration itself.
RUST: list[Callable[[Fleet], None]] = [drafts_are_counted_exactly]
