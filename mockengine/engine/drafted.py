# SPDX-License-Identifier: Apache-2.0
"""Requests whose outputs have as many tokens as drafts were accepted: who says what, and how they run.

Since outputs differ in length, no running set is made of them. Each request has a row of its own, of which all that is
the same from output to output is prepared once; tokens and acceptance are drawn for many outputs at once.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from mockengine.engine.config import BatchingConfig, EngineConfig
from mockengine.engine.drafts import Acceptance, DraftCounts, Drafts, SpeculationConfig
from mockengine.engine.loose import VaryingRow
from mockengine.engine.requests import Request
from mockengine.engine.runner import FreeRunner
from mockengine.engine.said import Said, Spoken
from mockengine.engine.scheduled import KvEventSink, ScheduledRequests
from mockengine.engine.speakers import Speakers
from mockengine.replies import TokenSource
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.stats import SchedulerStats


class DraftedSpeakers(Speakers):
    """The requests of one rank that run, each with drafts.

    Attributes:
        counts: what is counted of all of them.

    """

    def __init__(self, source: TokenSource, config: SpeculationConfig, max_model_len: int) -> None:
        super().__init__(source, 1)
        self.counts = DraftCounts(config.num_spec_tokens)
        self._config = config
        self._acceptance = Acceptance(config.acceptance_rates)
        self._num_spec_tokens = config.num_spec_tokens
        self._max_model_len = max_model_len
        self._drafts: dict[str, Drafts] = {}
        self._rows: dict[str, VaryingRow] = {}

    def drafts_of(self, request: Request) -> Drafts:
        """Return the drafts of a request, which are counted here, until it is gone."""
        drafts = self._drafts.get(request.request_id)
        if drafts is None:
            drafts = Drafts(self._config, self._acceptance, self.counts, request.key)
            self._drafts[request.request_id] = drafts
        return drafts

    def take(self, request_id: str) -> Request | None:
        """Remove a request, wherever it is."""
        self._rows.pop(request_id, None)
        self._drafts.pop(request_id, None)
        return super().take(request_id)

    def take_all(self) -> list[Request]:
        """Remove every request."""
        self._rows.clear()
        self._drafts.clear()
        return super().take_all()

    def most_steps(self, blocked: AbstractSet[int], most: int) -> int:  # noqa: ARG002 - the interface's
        """Return 1: what is said differs from step to step in more than tokens."""
        return 1

    def say(self, blocked: AbstractSet[int], steps: int) -> Spoken:  # noqa: ARG002 - always one
        """Let every request say its next tokens unless its client is blocked."""
        spoken = Spoken()
        for request in self._speaking.values():
            if request.client not in blocked:
                self._say(request, self._num_next(request), spoken)
        for request, _ in spoken.finished:
            del self._speaking[request.request_id]
        return spoken

    def say_of(self, requests: Sequence[Request], num_new_tokens: Sequence[int]) -> Spoken:
        """Let these requests say so many tokens each, and no others."""
        spoken = Spoken()
        for request, count in zip(requests, num_new_tokens, strict=True):
            self._say(request, count, spoken)
        return spoken

    def say_loosely(self, requests: Sequence[Request], num_new_tokens: Sequence[int]) -> Spoken:
        """Do the same: here requests are never rows among others."""
        return self.say_of(requests, num_new_tokens)

    def regroup(self, said: Mapping[int, Said]) -> None:
        """Do nothing: there are no running sets."""

    def _num_next(self, request: Request) -> int:
        """Return how many tokens a request says next, where no scheduler knows."""
        position = request.output_tokens
        if request.has_more_to_say:
            # What a prefill gives.
            return 1
        # As with a scheduler, drafts fill the context at most.
        room = self._max_model_len - request.num_prompt_tokens - position - 1
        num_drafts = min(self._num_spec_tokens, room)
        if num_drafts <= 0:
            return 1
        return min(1 + self.drafts_of(request).verify(position, num_drafts), request.num_reply_tokens - position)

    def _say(self, request: Request, count: int, spoken: Spoken) -> None:
        said = spoken.said.get(request.client)
        if said is None:
            said = spoken.said[request.client] = Said()
        request_id = request.request_id
        if request.has_more_to_say or request.output_tokens + count >= request.num_reply_tokens:
            # What its row has drawn ahead begins with these tokens.
            self._rows.pop(request_id, None)
            output = request.advance(count)
            spoken.tokens += len(output.new_token_ids)
            reason = output.finish_reason
            if reason is not None:
                output = replace(output, spec_decode_metrics=self.drafts_of(request).metrics())
                del self._drafts[request_id]
                spoken.finished.append((request, reason))
            said.outputs.append(output)
            return
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = VaryingRow(request, self._source)
        said.packed.append(row.say(count))
        spoken.tokens += count


class DraftedRunner(FreeRunner):
    """Runs everything that is there, each request with drafts."""

    def __init__(self, config: EngineConfig, source: TokenSource, speculation: SpeculationConfig) -> None:
        super().__init__(config, source)
        speakers = DraftedSpeakers(source, speculation, config.max_model_len)
        self._speakers = speakers
        self._counts = speakers.counts

    def take_stats(self) -> SchedulerStats:
        """Return how many requests run and wait, and what was drafted since the call before."""
        return replace(super().take_stats(), spec_decoding_stats=self._counts.take())


class DraftedRequests(ScheduledRequests):
    """The requests of a rank that share an engine, each with drafts."""

    def __init__(
        self,
        config: EngineConfig,
        batching: BatchingConfig,
        source: TokenSource,
        kv_event_sink: KvEventSink | None,
        speculation: SpeculationConfig,
    ) -> None:
        super().__init__(config, batching, source, kv_event_sink)
        speakers = DraftedSpeakers(source, speculation, config.max_model_len)
        self.speakers = self._drafted = speakers

    def add(
        self, request: Request, asked: EngineCoreRequest, now: float, *, leaves_a_token: bool, is_blocked: bool
    ) -> None:
        """Let a request wait for its admission from `now` on; the flags are those of its sequence."""
        super().add(request, asked, now, leaves_a_token=leaves_a_token, is_blocked=is_blocked)
        self.sequences[request.request_id].verifier = self._drafted.drafts_of(request)

    def take_stats(self) -> SchedulerStats:
        """Return the load, and queries, hits and drafts since the call before."""
        return replace(super().take_stats(), spec_decoding_stats=self._drafted.counts.take())


def make_requests(
    config: EngineConfig, batching: BatchingConfig, source: TokenSource, kv_event_sink: KvEventSink | None
) -> ScheduledRequests:
    """Return requests that share an engine, with drafts if the engine has any."""
    if config.speculation is None:
        return ScheduledRequests(config, batching, source, kv_event_sink)
    return DraftedRequests(config, batching, source, kv_event_sink, config.speculation)
