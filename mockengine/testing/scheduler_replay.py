# SPDX-License-Identifier: Apache-2.0
"""Plays recorded scenarios on the scheduler and writes what it did, in the form in which vLLM's own was recorded.

`python -m mockengine.testing.scheduler_replay SCENARIOS.json OUT.json` (either may end in .gz). A scenario that has a
`trace` is compared with it; the exit code is 1 if any differs. docs/fidelity.md describes the form.

The sampled token is 10000 + (37 · index of the request + n) mod 5000, n counting what was sampled for the request. What
is sampled and then dropped counts, so that a position of the reply has no token of its own here, unlike in the engine.
With speculative decoding n is that position.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mockengine.engine.drafts import Acceptance, DraftCounts, Drafts, SpeculationConfig
from mockengine.engine.kv_connector import KvConnector
from mockengine.engine.kv_transfer import KvTransfer
from mockengine.engine.scheduler import PauseState, SchedulerConfig
from mockengine.engine.sequences import TokenSequence
from mockengine.engine.speculative import make_scheduler
from mockengine.engine.steps import Pipeline, Progress, Step, StepResult
from mockengine.wire.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent
from mockengine.wire.outputs import EventType, FinishReason
from mockengine.wire.requests import LoraRequest, MultiModalFeature

Json = Any
_LETTERS = {EventType.QUEUED: "Q", EventType.SCHEDULED: "S", EventType.PREEMPTED: "P"}
_MOST_STEPS = 3000


class _Reply:
    """The outputs of one request as they really came."""

    def __init__(self, index: int, prompt: Sequence[int], stops: Sequence[int], max_tokens: int) -> None:
        self._index = index
        self._stops = frozenset(stops)
        self._max_tokens = max_tokens
        self._num_sampled = 0
        self.all_tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.under_way: list[list[int]] = []

    def _token(self, n: int) -> int:
        return 10_000 + (37 * self._index + n) % 5_000

    def read(self, start: int, count: int) -> Sequence[int]:
        """Return tokens by position."""
        return self.all_tokens[start : start + count]

    def sample(self, count: int) -> None:
        """Draw the tokens of a step that has begun."""
        self.under_way.append([self._token(self._num_sampled + ahead) for ahead in range(count)])
        self._num_sampled += count

    def arrive(self) -> None:
        """Take in the tokens of the oldest step under way."""
        self.all_tokens += self.under_way.pop(0)

    def settle(self, num_tokens: int) -> None:
        """Take back what the scheduler has dropped: it has so many tokens, prompt included."""
        del self.all_tokens[num_tokens:]

    def stop_reason(self, token: int) -> int | None:
        """Return the token if it ends the reply."""
        return token if token in self._stops else None

    def stops_after(self) -> int:
        """Return the number of outputs with which it ends, as things stand."""
        outputs = len(self.all_tokens) - self.num_prompt_tokens
        ahead = [token for tokens in self.under_way for token in tokens]
        ahead += [self._token(self._num_sampled + n) for n in range(self._max_tokens - outputs - len(ahead))]
        stop = next((place for place, token in enumerate(ahead, 1) if token in self._stops), self._max_tokens)
        return min(outputs + stop, self._max_tokens)


class _DraftedReply(_Reply):
    """A reply that comes in outputs of one token and the accepted drafts; all its tokens are known by position."""

    def __init__(self, index: int, prompt: Sequence[int], stops: Sequence[int], max_tokens: int) -> None:
        super().__init__(index, prompt, stops, max_tokens)
        self._reply = [self._token(n) for n in range(max_tokens)]
        self.all_tokens += self._reply

    def sample(self, count: int) -> None:
        """Do nothing: what is sampled is known."""

    def arrive(self) -> None:
        """Do nothing likewise."""

    def settle(self, num_tokens: int) -> None:
        """Do nothing likewise."""

    def stops_after(self) -> int:
        """Return the number of outputs with which it ends."""
        stops = (place for place, token in enumerate(self._reply, 1) if token in self._stops)
        return next(stops, self._max_tokens)


class _RecordedAcceptance(Acceptance):
    """Accepts as many drafts as when the scenarios were recorded; the key is the index of the request."""

    def draw(self, key: int, start: int, count: int) -> bytes:
        """Return the number of accepted drafts for outputs from a position on."""
        most = self.num_spec_tokens
        mixed = (31 * key + 17 * n + n * n // 3 for n in range(start, start + count))
        return bytes(number % (2 * most + 3) % (most + 1) for number in mixed)


class Replay:
    """One scenario on one scheduler."""

    def __init__(self, config: Mapping[str, Json], connector: KvConnector | None = None) -> None:
        self._max_model_len: int = config["model_len"]
        self._has_events: bool = config.get("kv_events", False)
        self._speculation: SpeculationConfig | None = None
        if "spec" in config:
            self._speculation = SpeculationConfig(acceptance_rates=(0.0,) * config["spec"], metrics="detailed")
            self._acceptance = _RecordedAcceptance(self._speculation.acceptance_rates)
            self._counts = DraftCounts(config["spec"])
        limits = SchedulerConfig(
            max_num_seqs=config["seqs"],
            max_num_batched_tokens=config["batched"],
            max_model_len=self._max_model_len,
            policy=config["policy"],
            long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
            enable_chunked_prefill=config.get("chunked", True),
            max_loras=config.get("max_loras"),
            num_spec_tokens=config.get("spec", 0),
        )
        self._scheduler = make_scheduler(
            limits,
            config["blocks"],
            config["block_size"],
            enable_prefix_caching=config["prefix"],
            enable_kv_cache_events=self._has_events,
            connector=connector,
        )
        self._cache = self._scheduler.cache
        self._pipeline = Pipeline(self._scheduler, 2 if config["async_sched"] else 1)
        self._replies: dict[TokenSequence, _Reply] = {}
        self._drafts: dict[str, Drafts] = {}
        self._num_blocks: dict[TokenSequence, int] = {}
        self._notes: list[Json] = []
        self._names: dict[BlockHash, int] = {}
        self._step = 0

    def play(self, events: Sequence[Json]) -> list[Json]:
        """Apply every event before its step, and return a row for every step."""
        rows = []
        left = sorted(events, key=lambda event: int(event[0]))
        for _ in range(_MOST_STEPS):
            if not left and not self._pipeline.is_busy:
                break
            self._step += 1
            self._notes = []
            while left and left[0][0] <= self._step:
                _, what, argument = left.pop(0)
                self._apply(what, argument)
            if self._pipeline.is_busy:
                rows.append(self.row())
        return rows

    def _apply(self, what: str, argument: Json) -> None:
        match what:
            case "add":
                self._add(argument)
            case "abort":
                self._scheduler.abort(argument)
            case "reset":
                self._notes.append(["reset", self._scheduler.reset_prefix_cache(bool(argument))])
            case "pause":
                self._scheduler.pause_state = PauseState(argument)
            case _:
                raise ValueError(f"events: {what} is not one of add, abort, reset, pause")

    def _add(self, request: Mapping[str, Json]) -> None:
        prompt, index = request["prompt"], len(self._replies)
        max_tokens = max(1, min(request["max_tokens"], self._max_model_len - len(prompt)))
        kind = _Reply if self._speculation is None else _DraftedReply
        reply = kind(index, prompt, request.get("stop", ()), max_tokens)
        lora = request.get("lora")
        sequence = TokenSequence(
            request_id=request["id"],
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            stops_after=reply.stops_after(),
            tokens=reply.read,
            priority=request.get("priority", 0),
            arrival_time=float(index),
            lora_request=LoraRequest(f"lora{lora}", lora, f"/lora{lora}") if lora else None,
            cache_salt=request.get("salt"),
            mm_features=tuple(
                MultiModalFeature("image", identifier, offset, length, None, has_data=True)
                for identifier, offset, length in request.get("mm", ())
            ),
            skip_reading_prefix_cache=request.get("skip", False),
            kv_transfer=self.kv_transfer(request),
        )
        if self._speculation is not None:
            drafts = Drafts(self._speculation, self._acceptance, self._counts, index)
            sequence.verifier = self._drafts[sequence.request_id] = drafts
        self._replies[sequence] = reply
        self._scheduler.add(sequence)

    def kv_transfer(self, request: Mapping[str, Json]) -> KvTransfer | None:  # noqa: ARG002 - for those who have one
        """Return a request's part in disaggregation, which a scenario alone does not tell."""
        return None

    def row(self) -> Json:
        """Make a step and return its row."""
        step, is_due = self._pipeline.start()
        scheduled = self._scheduled(step) if step is not None else []
        result = self._finish() if is_due else None
        scheduler = self._scheduler
        row: dict[str, Json] = {
            "step": self._step,
            "sched": scheduled,
            "preempted": sorted(sequence.request_id for sequence in step.preempted) if step is not None else [],
            "running": [sequence.request_id for sequence in scheduler.running],
            "waiting": [sequence.request_id for sequence in scheduler.waiting],
            "used_blocks": self._cache.num_used_blocks,
            "outputs": [self._output(progress) for progress in result] if result is not None else [],
            "stats": None,
            "prefix": None,
        }
        if result is not None:
            prefix = self._cache.take_stats()
            row["stats"] = [scheduler.num_running, scheduler.num_waiting, scheduler.num_skipped]
            row["prefix"] = [
                *(int(prefix.reset), prefix.requests, prefix.queries, prefix.hits),
                *(prefix.preempted_requests, prefix.preempted_queries, prefix.preempted_hits),
            ]
        if self._has_events:
            events = self._cache.take_events() if result is not None else ()
            row["kv"] = [self._event(event) for event in events]
        if self._notes:
            row["notes"] = self._notes
        if self._speculation is not None:
            row |= self._of_drafts(step, result)
        return row

    def _of_drafts(self, step: Step | None, result: StepResult | None) -> dict[str, Json]:
        """Return what a row says of drafts: those of the step, and what the result counts of others."""
        columns = zip(step.sequences, step.num_sampled, strict=True) if step is not None else ()
        stats = self._counts.take() if result is not None else None
        ended = [
            progress.sequence.request_id for progress in result or () if progress.news and progress.news.is_finished
        ]
        metrics = {request_id: self._drafts[request_id].metrics() for request_id in ended}
        return {
            "drafts": {sequence.request_id: sampled - 1 for sequence, sampled in columns if sampled > 1},
            "spec": stats
            and [
                *(stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens),
                *(list(stats.num_accepted_tokens_per_pos), list(stats.num_draft_tokens_per_pos)),
            ],
            "metrics": {
                request_id: [
                    *(list(of.histogram), of.num_draft_tokens, list(of.per_step_accepted), list(of.per_step_drafted))
                ]
                for request_id, of in metrics.items()
                if of is not None
            },
        }

    def _scheduled(self, step: Step) -> list[Json]:
        rows = []
        for sequence, computed, count, sampled in zip(
            step.sequences, step.num_computed, step.num_tokens, step.num_sampled, strict=True
        ):
            self._replies[sequence].sample(sampled)
            if sequence in step.new:
                kind, blocks_before = "new", 0
            elif sequence in step.resumed:
                kind, blocks_before = "resumed", 0
            else:
                kind, blocks_before = "run", self._num_blocks[sequence]
            self._num_blocks[sequence] = sequence.num_blocks
            rows.append([sequence.request_id, kind, count, computed, sequence.num_blocks - blocks_before])
        return rows

    def _event(self, event: KVCacheEvent) -> Json:
        row: list[Json]
        match event:
            case BlockStored():
                blocks, parent = [self._name(name) for name in event.block_hashes], event.parent_block_hash
                row = ["stored", blocks, None if parent is None else self._name(parent), list(event.token_ids)]
                row += [event.extra_keys, event.lora_name, event.lora_id, event.group_idx, event.kv_cache_spec_kind]
            case BlockRemoved():
                row = ["removed", [self._name(name) for name in event.block_hashes], event.group_idx]
            case AllBlocksCleared():
                row = ["cleared"]
        # Tuples become lists, as in what was recorded.
        return json.loads(json.dumps(row))

    def _name(self, block_hash: BlockHash) -> int:
        """Return a block's number in the order of appearance: its hash differs between engines."""
        return self._names.setdefault(block_hash, len(self._names))

    def _finish(self) -> StepResult:
        step = self._pipeline.oldest
        assert step is not None, "a result is due of a step under way"  # noqa: S101 - said by the pipeline
        for sequence in step.sequences:
            # The scheduler may ask for them at once; what it then drops is taken back.
            self._replies[sequence].arrive()
        result = self._pipeline.finish()
        for sequence in step.sequences:
            reply = self._replies[sequence]
            reply.settle(sequence.num_tokens)
            sequence.stops_after = reply.stops_after()
        return result

    def _output(self, progress: Progress) -> Json:
        sequence, count, news = progress
        reply = self._replies[sequence]
        tokens = reply.all_tokens[sequence.num_tokens - count : sequence.num_tokens]
        events, finish, stop_reason, prefill = "", None, None, None
        if news is not None:
            events = "".join(_LETTERS[event.type] for event in news.events)
            if news.is_finished:
                stop_reason = reply.stop_reason(tokens[-1])
                finish = FinishReason.LENGTH if stop_reason is None else FinishReason.STOP
            if news.prefill_stats is not None:
                stats = news.prefill_stats
                prefill = [
                    *(stats.num_prompt_tokens, stats.num_computed_tokens),
                    *(stats.num_cached_tokens, stats.num_cache_creation_tokens),
                ]
        return [sequence.request_id, tokens, events, finish, stop_reason, prefill]


def replay(scenario: Mapping[str, Json]) -> list[Json]:
    """Return a scenario's trace, a row for each step."""
    return Replay(scenario["config"]).play(scenario["events"])


def read(path: Path) -> list[Json]:
    """Read scenarios, compressed or not."""
    data = path.read_bytes()
    scenarios: list[Json] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return scenarios


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay scenarios and compare them with the traces that they have."""
    parser = argparse.ArgumentParser(prog="python -m mockengine.testing.scheduler_replay", description=__doc__)
    parser.add_argument("scenarios", type=Path, help="a list of scenarios as JSON")
    parser.add_argument("out", type=Path, help="where they are written, with their traces")
    asked = parser.parse_args(arguments)
    scenarios = read(asked.scenarios)
    played = [scenario | {"error": None, "trace": replay(scenario)} for scenario in scenarios]
    text = json.dumps(played).encode()
    asked.out.write_bytes(gzip.compress(text, mtime=0) if asked.out.suffix == ".gz" else text)
    recorded = [(before, now) for before, now in zip(scenarios, played, strict=True) if "trace" in before]
    different = [now["name"] for before, now in recorded if before["trace"] != now["trace"]]
    sys.stdout.write(f"{len(played)} replayed, {len(recorded)} compared, {len(different)} differ\n")
    sys.stdout.writelines(f"{name}\n" for name in different)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
