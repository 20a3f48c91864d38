# SPDX-License-Identifier: Apache-2.0
"""Requests whose outputs have as many tokens as drafts were accepted: who says what, and how they run.

Since outputs differ in length, no running set is made of them. Each request has a row of its own, of which all that is
the same from output to output is prepared once; tokens and acceptance are drawn for many outputs at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from mockengine.engine.adapters import Adapters
from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafts import Acceptance, DraftCounts, Drafts, SpeculationConfig
from mockengine.engine.loose import VaryingRow
from mockengine.engine.requests import Request
from mockengine.engine.runner import FreeRunner
from mockengine.engine.said import Said, Spoken
from mockengine.engine.scheduled import KvEventSink, ScheduledRequests
from mockengine.engine.speakers import Speakers
from mockengine.engine.steps import StepResult
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import SchedulerStats


class _DraftedRow(VaryingRow):
    """A request and its drafts.

    Attributes:
        request: who speaks.
        client: who hears it.
        drafts: decides how much is said at once.
        num_tokens: length of the reply.
        room: tokens of the reply that the context has room for.

    """

    __slots__ = ("client", "drafts", "num_tokens", "request", "room")

    def __init__(self, request: Request, drafts: Drafts, max_model_len: int) -> None:
        super().__init__(request)
        self.request = request
        self.client = request.client
        self.drafts = drafts
        self.num_tokens = request.num_reply_tokens
        self.room = max_model_len - request.num_prompt_tokens


class DraftedSpeakers(Speakers):
    """The requests of one rank that run, each with drafts.

    Attributes:
        counts: what is counted of all drafts.

    """

    def __init__(self, config: SpeculationConfig, max_model_len: int) -> None:
        super().__init__(1)
        self.counts = DraftCounts(config.num_spec_tokens)
        self._config = config
        self._acceptance = Acceptance(config.acceptance_rates)
        self._max_model_len = max_model_len
        self._rows: dict[str, _DraftedRow] = {}
        # Those who never speak together with others.
        self._apart: dict[str, _DraftedRow] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def add(self, requests: Mapping[str, Request]) -> None:
        """Let requests speak from now on, by id."""
        for request in requests.values():
            self.draft_for(request)

    def draft_for(self, request: Request) -> Drafts:
        """Let a request speak from now on; return its drafts."""
        row = self._apart.pop(request.request_id, None) or self._row(request)
        self._rows[request.request_id] = row
        return row.drafts

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is."""
        self._apart.pop(request_id, None)
        row = self._rows.pop(request_id, None)
        return None if row is None else row.request

    def take_all(self) -> list[Request]:
        """Remove every request."""
        requests = [row.request for row in self._rows.values()]
        self._rows.clear()
        self._apart.clear()
        return requests

    def most_steps(self, blocked: AbstractSet[int], most: int) -> int:  # noqa: ARG002 - the interface's
        """Return 1: what is said differs from step to step in more than tokens."""
        return 1

    def say(self, blocked: AbstractSet[int], steps: int) -> Spoken:  # noqa: ARG002 - always one
        """Let every request say its next tokens unless its client is blocked."""
        return self._say(self._rows.values(), blocked)

    def say_loosely(self, requests: Sequence[Request]) -> Spoken:
        """Let these requests say their next tokens, each at its own pace."""
        for request in requests:
            if request.request_id not in self._apart:
                self._apart[request.request_id] = self._row(request)
        return self._say([self._apart[request.request_id] for request in requests], frozenset())

    def _say(self, rows: Iterable[_DraftedRow], blocked: AbstractSet[int]) -> Spoken:
        spoken = Spoken()
        num_spec_tokens = self._config.num_spec_tokens
        tokens, client, packed = 0, None, list[bytes]()
        for row in rows:
            if row.client in blocked:
                continue
            position = row.request.output_tokens
            # A prefill gives one token, and as with a scheduler drafts fill the context at most.
            num_drafts = min(num_spec_tokens, row.room - position - 1) if position else 0
            count = 1 + row.drafts.verify(position, num_drafts) if num_drafts > 0 else 1
            if not position or position + count >= row.num_tokens or row.request.has_more_to_say:
                self._tell(row, count, spoken)
                continue
            if row.client != client:
                client = row.client
                packed = spoken.said.setdefault(client, Said()).packed
            packed.append(row.say(count))
            tokens += count
        return self._settle(spoken, tokens)

    def say_result(self, result: StepResult) -> Spoken:
        """Let the requests say their next tokens that a step has brought some, and no others."""
        spoken = Spoken()
        rows, all_news = self._rows, result.news
        tokens, client, packed = 0, None, list[bytes]()
        for index, (sequence, count) in enumerate(zip(result.sequences, result.num_new_tokens, strict=True)):
            row = rows[sequence.request_id]
            if index in all_news:
                news = all_news[index]
                if news.events or news.prefill_stats:
                    row.request.tell(news.events, news.prefill_stats)
            if index in all_news or row.request.has_more_to_say:
                self._tell(row, count, spoken)
                continue
            if row.client != client:
                client = row.client
                packed = spoken.said.setdefault(client, Said()).packed
            packed.append(row.say(count))
            tokens += count
        spoken.first_client = rows[result.sequences[0].request_id].client if result.sequences else None
        return self._settle(spoken, tokens)

    def regroup(self, said: Mapping[int, Said]) -> None:
        """Do nothing: there are no running sets."""

    def _tell(self, row: _DraftedRow, count: int, spoken: Spoken) -> None:
        """Let a request say so many tokens at most, and what else it has to say."""
        row.forget()
        output = row.request.advance(count)
        reason = output.finish_reason
        if reason is not None:
            if row.request.pooling is None:
                output = replace(output, spec_decode_metrics=row.drafts.metrics())
            spoken.finished.append((row.request, reason))
        spoken.tokens += len(output.new_token_ids)
        spoken.said.setdefault(row.client, Said()).outputs.append(output)

    def _settle(self, spoken: Spoken, tokens: int) -> Spoken:
        """Count tokens of rows, and forget who has ended."""
        spoken.tokens += tokens
        for request, _ in spoken.finished:
            if self._apart.pop(request.request_id, None) is None:
                del self._rows[request.request_id]
        return spoken

    def _row(self, request: Request) -> _DraftedRow:
        drafts = Drafts(self._config, self._acceptance, self.counts, request.key)
        return _DraftedRow(request, drafts, self._max_model_len)


class DraftedRunner(FreeRunner):
    """Runs everything that is there, each request with drafts."""

    def __init__(self, config: EngineConfig, speculation: SpeculationConfig) -> None:
        super().__init__(config)
        speakers = DraftedSpeakers(speculation, config.max_model_len)
        self._speakers = speakers
        self._counts = speakers.counts

    def take_stats(self) -> SchedulerStats:
        """Return how many requests run and wait, and what was drafted since the call before."""
        return replace(super().take_stats(), spec_decoding_stats=self._counts.take())


class DraftedRequests(ScheduledRequests):
    """The requests of a rank that share an engine, each with drafts."""

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        batching: BatchingConfig,
        kv_event_sink: KvEventSink | None,
        adapters: Adapters | None,
        speculation: SpeculationConfig,
    ) -> None:
        super().__init__(rank, config, batching, kv_event_sink, adapters)
        speakers = DraftedSpeakers(speculation, config.max_model_len)
        self.speakers = self._drafted = speakers

    def add(
        self, request: Request, asked: EngineCoreRequest, now: float, *, leaves_a_token: bool, is_blocked: bool
    ) -> None:
        """Let a request wait for its admission from `now` on; the flags are those of its sequence."""
        super().add(request, asked, now, leaves_a_token=leaves_a_token, is_blocked=is_blocked)
        self.sequences[request.request_id].verifier = self._drafted.draft_for(request)

    def say(self, result: StepResult, *, loosely: bool = False) -> Spoken:  # noqa: ARG002 - rows are always loose
        """Let the requests that a step has brought something to say it; those that have ended are gone."""
        spoken = self._drafted.say_result(result)
        self.forget_finished(spoken)
        return spoken

    def take_stats(self) -> SchedulerStats:
        """Return the load, and queries, hits and drafts since the call before."""
        return replace(super().take_stats(), spec_decoding_stats=self._drafted.counts.take())


def make_requests(
    rank: int,
    config: EngineConfig,
    batching: BatchingConfig,
    kv_event_sink: KvEventSink | None,
    adapters: Adapters | None,
) -> ScheduledRequests:
    """Return requests that share an engine, with drafts if the engine has any."""
    if config.speculation is None:
        return ScheduledRequests(rank, config, batching, kv_event_sink, adapters)
    return DraftedRequests(rank, config, batching, kv_event_sink, adapters, config.speculation)
