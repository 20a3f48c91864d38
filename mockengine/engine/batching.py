# SPDX-License-Identifier: Apache-2.0
"""How requests get to their last token in the way of vLLM: a scheduler, a KV cache, and steps that take time.

A step is scheduled, is computed for as long as the model of time says, and then its result arrives. Where scheduling is
asynchronous, as on a GPU, the next step is scheduled before that. Steps are computed one after the other, so each ends
so long after the one before it has ended, or after it was scheduled if nothing was being computed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.kv_cache import KVCache
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduler import Scheduler, SchedulerConfig
from mockengine.engine.sequences import TokenSequence
from mockengine.engine.speakers import Speakers
from mockengine.engine.steps import Pipeline, Step, StepResult
from mockengine.engine.timing import StepLoad, StepTiming
from mockengine.replies import TokenSource
from mockengine.wire.kv_events import KVCacheEvent
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.stats import SchedulerStats

KvEventSink = Callable[[Sequence[KVCacheEvent]], None]
"""Hears of what happened to the blocks of a rank in a step."""

_SYNCHRONOUS: Final = 1
_ASYNCHRONOUS: Final = 2
# What a step takes that computes nothing although requests are there, so that waiting costs no core.
_IDLE_STEP_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that is computed: how long that takes, and when it is done."""

    duration_s: float
    ends_at: float


class BatchRunner:
    """Runs requests as vLLM's engine does."""

    def __init__(
        self, config: EngineConfig, source: TokenSource, timing: StepTiming, kv_event_sink: KvEventSink | None
    ) -> None:
        """Begin with nothing to do.

        Args:
            config: with `batching`.
            source: of tokens.
            timing: how long steps take.
            kv_event_sink: hears of what happens to blocks, if there is somebody to hear it.

        """
        batching = config.batching or BatchingConfig()
        self._cache = KVCache(
            batching.num_gpu_blocks,
            config.block_size,
            enable_prefix_caching=batching.enable_prefix_caching,
            enable_kv_cache_events=kv_event_sink is not None,
        )
        limits = SchedulerConfig(
            max_num_seqs=batching.max_num_seqs,
            max_num_batched_tokens=batching.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            policy=batching.scheduling_policy,
            long_prefill_token_threshold=batching.long_prefill_token_threshold,
            tokens_per_step=config.output_token_chunk_size,
        )
        self._scheduler = Scheduler(limits, self._cache)
        self._pipeline = Pipeline(self._scheduler, _ASYNCHRONOUS if batching.async_scheduling else _SYNCHRONOUS)
        self._source = source
        self._max_model_len = config.max_model_len
        self._chunk_size = config.output_token_chunk_size
        self._timing = timing
        self._kv_event_sink = kv_event_sink
        self._speakers = Speakers(source, config.output_token_chunk_size)
        self._requests: dict[str, Request] = {}
        self._sequences: dict[str, TokenSequence] = {}
        self._held: AbstractSet[int] = frozenset()
        self._under_way: deque[_UnderWay] = deque()

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, for room in the cache, or for something else."""
        return self._scheduler.num_waiting + self._scheduler.num_skipped

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request, asked: EngineCoreRequest) -> None:
        """Let a request wait for its admission."""
        sequence = _sequence_of(request, asked, self._source, self._max_model_len)
        sequence.is_blocked = request.client in self._held
        self._requests[request.request_id] = request
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence, request.accepted_at)

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is; what is being computed for it is dropped."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            del self._sequences[request_id]
            self._scheduler.abort(request_id)
            self._speakers.take(request_id)
        return request

    def take_all(self) -> list[Request]:
        """Remove every request."""
        requests = list(self._requests.values())
        for request in requests:
            self.take(request.request_id)
        return requests

    def due(self, now: float, blocked: AbstractSet[int]) -> float | None:
        """Return when the oldest step under way ends, or `now` if one can be scheduled, or None."""
        if self._under_way:
            return self._under_way[0].ends_at
        if not self._scheduler.has_requests or self._is_held_up(blocked):
            return None
        return now

    def step(self, now: float, blocked: AbstractSet[int], most_steps: int) -> Spoken:  # noqa: ARG002 - each has its time
        """Take in the result of the step that has ended, if one has, and schedule what can be."""
        self._hold(blocked)
        spoken = Spoken()
        begin = now
        if self._under_way and self._under_way[0].ends_at <= now:
            ended = self._under_way.popleft()
            spoken = self._say(self._pipeline.finish())
            # From when it should have been, unless that has been missed by a whole step.
            begin = ended.ends_at if now - ended.ends_at < ended.duration_s else now
        if not self._is_held_up(blocked):
            self._start(now, begin)
        if self._kv_event_sink is not None and (events := self._cache.take_events()):
            self._kv_event_sink(events)
        return spoken

    def settle(self, spoken: Spoken, now: float) -> None:  # noqa: ARG002 - steps know their time
        """Go on after a step."""
        self._speakers.regroup(spoken.said)

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait, and how full the cache is."""
        return SchedulerStats(
            num_running_reqs=self._scheduler.num_running,
            num_waiting_reqs=self._scheduler.num_waiting,
            num_skipped_waiting_reqs=self._scheduler.num_skipped,
            kv_cache_usage=self._cache.usage,
        )

    def take_stats(self) -> SchedulerStats:
        """Return that, and queries and hits of the prefix cache since the call before."""
        return SchedulerStats(
            num_running_reqs=self._scheduler.num_running,
            num_waiting_reqs=self._scheduler.num_waiting,
            num_skipped_waiting_reqs=self._scheduler.num_skipped,
            kv_cache_usage=self._cache.usage,
            prefix_cache_stats=self._cache.take_stats(),
        )

    def reset_prefix_cache(self, now: float, *, reset_running: bool) -> bool:
        """Forget what is cached; tell whether that was possible.

        Args:
            now: the time, in engine seconds.
            reset_running: preempt whatever runs first, whose cache cannot be forgotten.

        """
        return self._scheduler.reset_prefix_cache(reset_running, now)

    def _start(self, now: float, begin: float) -> None:
        """Schedule steps until the result of the oldest one has to be waited for."""
        has_to_wait = False
        while not has_to_wait:
            step, has_to_wait = self._pipeline.start(now)
            if step is None:
                return
            if self._under_way:
                begin = self._under_way[-1].ends_at
            duration_s = self._duration_s(step)
            self._under_way.append(_UnderWay(duration_s, begin + duration_s))

    def _duration_s(self, step: Step) -> float:
        if not step.is_empty:
            return self._timing.duration_s(StepLoad(*step.load(self._chunk_size)))
        return _IDLE_STEP_S if self._requests else 0.0

    def _say(self, result: StepResult) -> Spoken:
        requests = [self._requests[sequence.request_id] for sequence in result.sequences]
        for index, news in result.news.items():
            requests[index].tell(news.events, news.prefill_stats)
        spoken = self._speakers.say_of(requests)
        for request, _ in spoken.finished:
            del self._requests[request.request_id], self._sequences[request.request_id]
        spoken.is_reported = True
        return spoken

    # Clients that take no output.

    def _hold(self, blocked: AbstractSet[int]) -> None:
        """Let the requests of these clients stay where they are, and those of others go on."""
        changed = self._held ^ blocked
        if changed:
            self._held = frozenset(blocked)
            for request_id, request in self._requests.items():
                if request.client in changed:
                    self._sequences[request_id].is_blocked = request.client in blocked

    def _is_held_up(self, blocked: AbstractSet[int]) -> bool:
        """Tell whether nobody is there whose client takes output."""
        if not blocked or not self._requests:
            return False
        return all(request.client in blocked for request in self._requests.values())


def _sequence_of(request: Request, asked: EngineCoreRequest, source: TokenSource, max_model_len: int) -> TokenSequence:
    """Return what the scheduler is to know of a request."""
    num_prompt_tokens = asked.num_prompt_tokens
    prompt = asked.prompt_token_ids
    key = request.key

    def tokens(start: int, count: int) -> Sequence[int]:
        of_prompt = (
            prompt[start : start + count] if prompt is not None else [0] * max(0, min(count, num_prompt_tokens - start))
        )
        missing = count - len(of_prompt)
        if not missing:
            return of_prompt
        return [*of_prompt, *source.tokens(key, start + len(of_prompt) - num_prompt_tokens, missing)]

    params = asked.sampling_params or SamplingParams()
    room = max_model_len - num_prompt_tokens
    return TokenSequence(
        request_id=request.request_id,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max(1, room if params.max_tokens is None else min(room, params.max_tokens)),
        stops_after=max(1, request.num_reply_tokens),
        tokens=tokens,
        priority=asked.priority,
        arrival_time=asked.arrival_time,
        lora_request=asked.lora_request,
        cache_salt=_salt(asked),
        mm_features=asked.mm_features,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache or params.prompt_logprobs is not None,
    )


def _salt(asked: EngineCoreRequest) -> str | None:
    """Return what keeps blocks apart that have the same token ids: a prompt of embeddings has none of its own."""
    if asked.prompt_embeds is None:
        return asked.cache_salt
    return f"{asked.cache_salt or ''}/{blake2b(asked.prompt_embeds.data, digest_size=16).hexdigest()}"
