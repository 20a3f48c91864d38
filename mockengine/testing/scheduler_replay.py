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
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mockengine.engine.drafts import DraftCounts, Drafts, SpeculationConfig
from mockengine.engine.kv_connector import KvConnector
from mockengine.engine.kv_transfer import KvTransfer
from mockengine.engine.scheduler import PauseState, SchedulerConfig
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.speculative import make_scheduler
from mockengine.engine.steps import Pipeline, Progress, Step, StepResult
from mockengine.testing.replayed_reply import DraftedReply, RecordedAcceptance, Reply
from mockengine.wire.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent
from mockengine.wire.outputs import EventType, FinishReason
from mockengine.wire.requests import LoraRequest, MultiModalFeature

Json = Any
_LETTERS = {EventType.QUEUED: "Q", EventType.SCHEDULED: "S", EventType.PREEMPTED: "P"}
_MOST_STEPS = 3000


class Replay:
    """One scenario on one scheduler."""

    def __init__(self, config: Mapping[str, Json], connector: KvConnector | None = None) -> None:
        self._max_model_len: int = config["model_len"]
        self._has_events: bool = config.get("kv_events", False)
        self._speculation: SpeculationConfig | None = None
        if "spec" in config:
            self._speculation = SpeculationConfig(acceptance_rates=(0.0,) * config["spec"], metrics="detailed")
            self._acceptance = RecordedAcceptance(self._speculation.acceptance_rates)
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
        self._replies: dict[TokenSequence, Reply] = {}
        self._drafts: dict[str, Drafts] = {}
        # Sessions by id, each with what has come while it could not be taken in; None is its end.
        self._sessions: dict[str, tuple[TokenSequence, deque[Json]]] = {}
        self._num_added = 0
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
                self._num_added += 1
                request = {"arrival": float(self._num_added), **argument}
                if argument["id"] in self._sessions:
                    self._hear(*self._sessions[argument["id"]], request)
                else:
                    self._add(request)
            case "abort":
                self._sessions.pop(argument, None)
                self._scheduler.abort(argument)
            case "reset":
                self._notes.append(["reset", self._scheduler.reset_prefix_cache(bool(argument))])
            case "pause":
                self._scheduler.pause_state = PauseState(argument)
            case _:
                raise ValueError(f"events: {what} is not one of add, abort, reset, pause")

    def _add(self, request: Mapping[str, Json]) -> None:
        prompt, index = request["prompt"], len(self._replies)
        kind = Reply if self._speculation is None else DraftedReply
        reply = kind(index, prompt, request.get("stop", ()), self._max_tokens(request, len(prompt)))
        sequence = self._sequence(request, reply)
        if self._speculation is not None:
            drafts = Drafts(self._speculation, self._acceptance, self._counts, index)
            sequence.verifier = self._drafts[sequence.request_id] = drafts
        self._replies[sequence] = reply
        if sequence.is_resumable:
            self._sessions[sequence.request_id] = sequence, deque()
        self._scheduler.add(sequence)

    def _max_tokens(self, request: Mapping[str, Json], num_prompt_tokens: int) -> int:
        return max(1, min(int(request["max_tokens"]), self._max_model_len - num_prompt_tokens))

    def _sequence(self, request: Mapping[str, Json], reply: Reply) -> TokenSequence:
        lora, num_prompt_tokens = request.get("lora"), reply.num_prompt_tokens
        return TokenSequence(
            request_id=request["id"],
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=self._max_tokens(request, num_prompt_tokens),
            stops_after=reply.stops_after(),
            tokens=reply.read,
            priority=request.get("priority", 0),
            arrival_time=request["arrival"],
            lora_request=LoraRequest(f"lora{lora}", lora, f"/lora{lora}") if lora else None,
            cache_salt=request.get("salt"),
            mm_features=tuple(
                MultiModalFeature("image", identifier, offset, length, None, has_data=True)
                for identifier, offset, length in request.get("mm", ())
            ),
            skip_reading_prefix_cache=request.get("skip", False),
            kv_transfer=self.kv_transfer(request),
            is_resumable=request.get("resumable", False),
        )

    # Sessions.

    def _hear(self, sequence: TokenSequence, heard: deque[Json], request: Json) -> None:
        """Take in more of a session, or that no more comes."""
        if sequence.status is Status.PAUSED:
            self._go_on(sequence, heard, request, at_once=False)
            return
        heard.append(request)
        if len(heard) == 1 and not request.get("resumable", False):
            self._scheduler.close(sequence.request_id)

    def _go_on(self, sequence: TokenSequence, heard: deque[Json], request: Json, *, at_once: bool) -> None:
        if not request.get("resumable", False):
            self._scheduler.close(sequence.request_id)
            return
        reply = self._replies[sequence]
        kept = sequence.num_tokens - 1
        max_tokens = self._max_tokens(request, kept + len(request["prompt"]))
        reply.go_on(kept, request["prompt"], request.get("stop", ()), max_tokens)
        self._scheduler.go_on(sequence, self._sequence(request, reply), at_once=at_once)
        if heard and not heard[0].get("resumable", False):
            self._scheduler.close(sequence.request_id)

    def _go_on_at_once(self, request_id: str) -> str:
        """Let a session go on of which more has come, and return what it then tells; forget it if it has ended."""
        if request_id not in self._sessions:
            return ""
        sequence, heard = self._sessions[request_id]
        if sequence.is_finished:
            del self._sessions[request_id]
        elif sequence.status is Status.PAUSED and heard:
            self._go_on(sequence, heard, heard.popleft(), at_once=True)
            return _LETTERS[EventType.QUEUED]
        return ""

    def kv_transfer(self, request: Mapping[str, Json]) -> KvTransfer | None:  # noqa: ARG002 - for those who have one
        """Return a request's part in disaggregation, which a scenario alone does not tell."""
        return None

    def row(self) -> Json:
        """Make a step and return its row."""
        step, is_due = self._pipeline.start()
        scheduled = self._scheduled(step) if step is not None else []
        result = self._finish() if is_due else None
        outputs = [self._output(progress) for progress in result] if result is not None else []
        for output in outputs:
            # That more of a session is queued is told with what it has said before.
            output[2] += self._go_on_at_once(output[0])
        scheduler = self._scheduler
        row: dict[str, Json] = {
            "step": self._step,
            "sched": scheduled,
            "preempted": sorted(sequence.request_id for sequence in step.preempted) if step is not None else [],
            "running": [sequence.request_id for sequence in scheduler.running],
            "waiting": [sequence.request_id for sequence in scheduler.waiting],
            "used_blocks": self._cache.num_used_blocks,
            "outputs": outputs,
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
