# SPDX-License-Identifier: Apache-2.0
"""Requests that share an engine as vLLM's scheduler and KV cache have it; when they are stepped is told elsewhere.

`batching` has steps that take time one after the other, `moments` requests that each have moments of their own.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from hashlib import blake2b
from math import isnan
from typing import Final

from mockengine.engine.adapters import Adapters
from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.kv_connector import KvConnector
from mockengine.engine.requests import Request
from mockengine.engine.said import Spoken
from mockengine.engine.scheduler import PauseState, SchedulerConfig
from mockengine.engine.sequences import TokenSequence
from mockengine.engine.speakers import Speakers
from mockengine.engine.speculative import make_scheduler
from mockengine.engine.steps import Step, StepResult
from mockengine.engine.transfers import Transfers
from mockengine.replies import TokenSource
from mockengine.wire.kv_events import KVCacheEvent
from mockengine.wire.requests import EngineCoreRequest, LoraRequest, MultiModalFeature
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.stats import SchedulerStats

KvEventSink = Callable[[Sequence[KVCacheEvent]], None]
"""Hears of what happened to the blocks of a rank in a step."""

# Of a pooling request, which to a scheduler is one that says a single token.
_NO_TOKENS: Final = SamplingParams(max_tokens=1)
# Tokens of a reply that are drawn at once for the names of its blocks.
_DRAWN_AHEAD: Final = 128


class ScheduledRequests:
    """The requests of a rank, their sequences, and what schedules these."""

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        batching: BatchingConfig,
        kv_event_sink: KvEventSink | None,
        adapters: Adapters | None = None,
    ) -> None:
        """Begin with nothing to do.

        Args:
            rank: of the engine.
            config: what it plays.
            batching: its limits and its cache.
            kv_event_sink: hears of what happens to blocks, if there is somebody to hear it.
            adapters: which are loaded, where there may be any.

        """
        limits = SchedulerConfig(
            max_num_seqs=batching.max_num_seqs,
            max_num_batched_tokens=batching.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            policy=batching.scheduling_policy,
            long_prefill_token_threshold=batching.long_prefill_token_threshold,
            tokens_per_step=config.output_token_chunk_size,
            num_spec_tokens=config.num_spec_tokens,
            max_loras=None if config.loras is None else config.loras.max_loras,
        )
        connector = None
        if config.kv_transfer is not None:
            connector = KvConnector(config.kv_transfer, rank, config.data_parallel_size)
        self.scheduler = make_scheduler(
            limits,
            batching.num_gpu_blocks,
            config.block_size,
            enable_prefix_caching=batching.enable_prefix_caching,
            enable_kv_cache_events=kv_event_sink is not None,
            connector=connector,
        )
        self.cache = self.scheduler.cache
        self._connector = connector
        self._transfers = None if connector is None else Transfers(connector, self.scheduler)
        self.speakers = Speakers(config.output_token_chunk_size)
        self.by_id: dict[str, Request] = {}
        self.sequences: dict[str, TokenSequence] = {}
        self._adapters = adapters
        if adapters is not None:
            adapters.in_use = self._loras_in_use
        self._max_model_len = config.max_model_len
        self._kv_event_sink = kv_event_sink

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, for room in the cache, or for something else."""
        return self.scheduler.num_waiting + self.scheduler.num_skipped - self.scheduler.num_paused

    def add(
        self, request: Request, asked: EngineCoreRequest, now: float, *, leaves_a_token: bool, is_blocked: bool
    ) -> None:
        """Let a request wait for its admission from `now` on; the flags are those of its sequence.

        The next turn of a session goes on with the sequence of the one before, if that is there.
        """
        sequence = _sequence_of(request, asked, self._max_model_len)
        sequence.leaves_a_token = leaves_a_token
        sequence.is_blocked = is_blocked
        self.by_id[request.request_id] = request
        paused = self.sequences.setdefault(request.request_id, sequence)
        if paused is sequence:
            self.scheduler.add(sequence, now)
        else:
            self.scheduler.go_on(paused, sequence, now, at_once=request.is_queued_told)

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is; what is being computed for it is dropped."""
        request = self.by_id.pop(request_id, None)
        if self.sequences.pop(request_id, None) is not None:
            self.scheduler.abort(request_id)
            self.speakers.take(request_id)
        return request

    def close(self, request_id: str) -> None:
        """Let a session end with the turn that is there, or now if it waits for input."""
        self.scheduler.close(request_id)
        if request_id not in self.by_id:
            self.sequences.pop(request_id, None)

    def take_all(self) -> list[Request]:
        """Remove every request."""
        requests = list(self.by_id.values())
        for request_id in list(self.sequences):
            self.take(request_id)
        return requests

    def say(self, result: StepResult, *, loosely: bool = False) -> Spoken:
        """Let the requests that a step has brought something to say it; those that have ended are gone.

        Args:
            result: of the step.
            loosely: whether requests seldom step together.

        """
        requests = [self.by_id[sequence.request_id] for sequence in result.sequences]
        for index, news in result.news.items():
            if news.events or news.prefill_stats:
                self.speakers.set_apart(requests[index])
            requests[index].tell(news.events, news.prefill_stats, news.kv_transfer_params)
        spoken = self.speakers.say_loosely(requests) if loosely else self.speakers.say_of(requests)
        spoken.first_client = requests[0].client if requests else None
        self.forget_finished(spoken)
        return spoken

    def forget_finished(self, spoken: Spoken) -> None:
        """Forget the requests that have said their last, and their sequences but for those of sessions."""
        for request, _ in spoken.finished:
            del self.by_id[request.request_id]
            if self.sequences[request.request_id].is_finished:
                del self.sequences[request.request_id]

    # Other instances.

    @property
    def transfer_due(self) -> float | None:
        """When the next transfer ends; None: there is none."""
        return None if self._transfers is None else self._transfers.due

    def begin_transfers(self, step: Step | None, result: StepResult | None, now: float) -> None:
        """Begin what has to be loaded since a step was scheduled, or kept since one has ended."""
        if self._transfers is not None:
            if step is not None:
                self._transfers.load(step, now)
            if result is not None:
                self._transfers.keep(result, now)

    def end_transfers(self, now: float) -> bool:
        """End the transfers that are over; tell whether there was any."""
        return self._transfers is not None and self._transfers.end(now)

    def reset_connector(self) -> None:
        """Note that what other instances have cached is not to be counted on."""
        if self._connector is not None:
            self._connector.reset()

    # Adapters.

    def load_adapters(self, step: Step) -> float:
        """Have the adapters in slots of those who are admitted by a step; return how long that takes, in seconds."""
        if self._adapters is None:
            return 0.0
        loras = [sequence.lora_request for sequence in (*step.new, *step.resumed)]
        return sum(self._adapters.use(lora) for lora in loras if lora is not None)

    def _loras_in_use(self) -> Iterable[LoraRequest]:
        return [sequence.lora_request for sequence in self.scheduler.running if sequence.lora_request is not None]

    # What is reported.

    def publish(self) -> None:
        """Tell of what has happened to blocks."""
        if self._kv_event_sink is not None and (events := self.cache.take_events()):
            self._kv_event_sink(events)

    def are_all_of(self, clients: AbstractSet[int]) -> bool:
        """Tell whether requests are there, and all are of these clients."""
        if not clients or not self.by_id:
            return False
        return all(request.client in clients for request in self.by_id.values())

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait, and how full the cache is."""
        return SchedulerStats(
            num_running_reqs=self.scheduler.num_running,
            num_waiting_reqs=self.scheduler.num_waiting,
            num_skipped_waiting_reqs=self.scheduler.num_skipped,
            kv_cache_usage=self.cache.usage,
        )

    def take_stats(self) -> SchedulerStats:
        """Return that, and queries and hits of the caches since the call before."""
        stats = replace(self.load(), prefix_cache_stats=self.cache.take_stats())
        if self._connector is None:
            return stats
        return replace(
            stats,
            num_kv_fetch_reqs_by_stage=self._connector.stages,
            connector_prefix_cache_stats=self._connector.take_stats(),
        )


class ScheduledRunner:
    """What runners have in common that leave it to a scheduler whose turn it is."""

    def __init__(self, requests: ScheduledRequests) -> None:
        self._requests = requests
        self._scheduler = requests.scheduler
        self._frozen_at = 0.0

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way, in which an engine takes in nothing but aborts."""
        return False

    @property
    def may_step_anytime(self) -> bool:
        """Whether a step may be made before one is due, to report what has happened."""
        return not self.is_computing

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._requests.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, for room in the cache, or for something else."""
        return self._requests.num_waiting

    @property
    def num_paused(self) -> int:
        """Sessions that wait for input and hold blocks."""
        return self._scheduler.num_paused

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests.by_id

    def close(self, request_id: str) -> None:
        """Take note that no turn of a session follows the one that is there, if there is one."""
        self._requests.close(request_id)

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is; what is being computed for it is dropped."""
        return self._requests.take(request_id)

    def take_all(self) -> list[Request]:
        """Remove every request; nothing is computed any more."""
        return self._requests.take_all()

    def abort_all(self) -> list[Request]:
        """Remove every request; a step that is under way ends in its time."""
        return self.take_all()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left that may be stepped, or that another instance is to load."""
        return not self._scheduler.has_unfinished_requests and self._requests.transfer_due is None

    @property
    def pause_state(self) -> PauseState:
        """What is paused."""
        return self._scheduler.pause_state

    def pause(self, state: PauseState, now: float) -> None:
        """Stop the admission of requests, or everything, or nothing."""
        was, self._scheduler.pause_state = self._scheduler.pause_state, state
        if state is PauseState.PAUSED_ALL:
            self._frozen_at = self._frozen_at if was is state else now
        elif was is PauseState.PAUSED_ALL:
            self.stand_still(now - self._frozen_at)

    def stand_still(self, seconds: float) -> None:
        """Do nothing: a step under way ends in its time, and the next one begins when it can."""

    def in_flight(self) -> Iterator[tuple[Request, int]]:
        """Yield every request and the tokens that it has said."""
        running = self._requests.speakers.in_flight()
        said = {request.request_id: tokens for request, tokens in running}
        for request in self._requests.by_id.values():
            yield request, said.get(request.request_id, request.output_tokens)

    def limit(self, batching: BatchingConfig) -> None:
        """Have other limits for what runs and what is computed at once, from the next step on."""
        self._scheduler.limit(batching.max_num_seqs, batching.max_num_batched_tokens)

    def occupy_kv_cache(self, share: float) -> None:
        """Have that share of the KV cache held by nobody, as far as it is free; 0 frees it."""
        self._requests.cache.occupy(share)

    def load(self) -> SchedulerStats:
        """Return how many requests run and wait, and how full the cache is."""
        return self._requests.load()

    def take_stats(self) -> SchedulerStats:
        """Return that, and queries and hits of the prefix cache since the call before."""
        return self._requests.take_stats()

    def reset_prefix_cache(self, now: float, *, reset_running: bool, reset_connector: bool = False) -> bool:
        """Forget what is cached; tell whether that was possible.

        Args:
            now: the time, in engine seconds.
            reset_running: preempt whatever runs first, whose cache cannot be forgotten.
            reset_connector: forget what other instances have too.

        """
        is_reset = self._scheduler.reset_prefix_cache(reset_running, now)
        if is_reset and reset_connector:
            self._requests.reset_connector()
        return is_reset


class _TokenReader:
    """Tokens of a prompt and of the reply to it, numbered through; those of the reply are drawn ahead."""

    __slots__ = ("_ahead", "_ahead_from", "_key", "_num_prompt_tokens", "_prompt", "_source")

    def __init__(self, asked: EngineCoreRequest, key: int, source: TokenSource) -> None:
        self._num_prompt_tokens = asked.num_prompt_tokens
        # A prompt of embeddings has no ids; its salt tells it from others.
        self._prompt: Sequence[int] = asked.prompt_token_ids or array("I", bytes(4 * self._num_prompt_tokens))
        self._key = key
        self._source = source
        self._ahead: list[int] = []
        self._ahead_from = 0

    def __call__(self, start: int, count: int) -> Sequence[int]:
        """Return so many tokens from a position on."""
        place = start - self._num_prompt_tokens
        if place >= 0:
            return self._of_reply(place, count)
        of_prompt = self._prompt[start : start + count]
        missing = count - len(of_prompt)
        return [*of_prompt, *self._of_reply(0, missing)] if missing else of_prompt

    def _of_reply(self, place: int, count: int) -> list[int]:
        if place < self._ahead_from or place + count > self._ahead_from + len(self._ahead):
            self._ahead = self._source.tokens(self._key, place, max(count, _DRAWN_AHEAD))
            self._ahead_from = place
        return self._ahead[place - self._ahead_from : place - self._ahead_from + count]


def _sequence_of(request: Request, asked: EngineCoreRequest, max_model_len: int) -> TokenSequence:
    """Return what the scheduler is to know of a request."""
    params, pooling = asked.sampling_params or _NO_TOKENS, asked.pooling_params
    num_prompt_tokens = asked.num_prompt_tokens
    room = max_model_len - num_prompt_tokens
    return TokenSequence(
        request_id=request.request_id,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max(1, room if params.max_tokens is None else min(room, params.max_tokens)),
        stops_after=max(1, request.num_reply_tokens),
        tokens=_TokenReader(asked, request.key, request.source),
        priority=asked.priority,
        # Nothing can be ordered by what is no number.
        arrival_time=0.0 if isnan(asked.arrival_time) else asked.arrival_time,
        lora_request=asked.lora_request,
        cache_salt=_salt(asked),
        mm_features=_features_within(asked.mm_features, num_prompt_tokens),
        skip_reading_prefix_cache=params.skip_reading_prefix_cache
        or params.prompt_logprobs is not None
        or (pooling is not None and (pooling.skip_reading_prefix_cache or pooling.late_chunk_size is not None)),
        kv_transfer=request.kv_transfer,
        is_resumable=request.is_resumable,
    )


def _features_within(features: Sequence[MultiModalFeature], num_tokens: int) -> tuple[MultiModalFeature, ...]:
    """Return features without what they claim beyond the prompt, which may be any number of tokens."""
    return tuple(
        replace(feature, length=min(feature.length, num_tokens - feature.offset))
        for feature in features
        if 0 <= feature.offset < num_tokens
    )


def _salt(asked: EngineCoreRequest) -> str | None:
    """Return what keeps blocks apart that have the same token ids: a prompt of embeddings has none of its own."""
    if asked.prompt_embeds is None:
        return asked.cache_salt
    return f"{asked.cache_salt or ''}/{blake2b(asked.prompt_embeds.data, digest_size=16).hexdigest()}"
