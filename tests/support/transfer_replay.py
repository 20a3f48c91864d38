# SPDX-License-Identifier: Apache-2.0
"""Recorded scenarios of a scheduler with vLLM's NixlConnector: loading and keeping are counted in results of steps.

A request may have `params` (its `kv_transfer_params`), `load` and `keep`: so many results arrive from when its blocks
are given to it until they are loaded, or from its end until they are free. Rows say besides what a connector adds to
the outputs and statistics of a step; of `remote_block_ids` how many there are.
"""

from collections.abc import Mapping
from typing import Any, Final

from mockengine.engine.config import KvTransferConfig
from mockengine.engine.kv_connector import KvConnector
from mockengine.engine.kv_transfer import KvTransfer, read_kv_transfer
from mockengine.engine.scheduler import Scheduler
from mockengine.engine.sequences import TokenSequence
from mockengine.engine.steps import Pipeline, Step, StepResult
from mockengine.testing.scheduler_replay import Replay

Json = Any
_ENGINE_ID: Final = "lab"


class TransferReplay(Replay):
    """One scenario on one scheduler with a connector."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        role = config["kv_role"]
        transfer = KvTransferConfig(
            engine_id=_ENGINE_ID, is_producer=role != "kv_consumer", is_consumer=role != "kv_producer"
        )
        self._connector = KvConnector(transfer, rank=0, data_parallel_size=1)
        super().__init__(config, self._connector)
        self._block_size: int = config["block_size"]
        self._steps = _Counted(self._scheduler)
        self._pipeline = Pipeline(self._steps, 2 if config["async_sched"] else 1)

    def kv_transfer(self, request: Mapping[str, Json]) -> KvTransfer | None:
        extra_args = {"kv_transfer_params": request.get("params")}
        transfer, problem = read_kv_transfer(extra_args, len(request["prompt"]), self._block_size)
        assert problem is None
        self._steps.patience[request["id"]] = request["load"], request["keep"]
        return transfer

    def row(self) -> Json:
        self._steps.results.clear()
        row = super().row()
        row |= {"params": {}, "external": {}, "fetch": None, "sources": None, "connector": None}
        for result in self._steps.results:
            self._add_to(row, result)
        return row

    def _add_to(self, row: dict[str, Json], result: StepResult) -> None:
        for sequence, _, news in result:
            if news is None:
                continue
            if news.prefill_stats is not None:
                stats = news.prefill_stats
                row["external"][sequence.request_id] = [stats.num_local_cached_tokens, stats.num_external_cached_tokens]
            if news.kv_transfer_params is not None:
                row["params"][sequence.request_id] = _without_numbers(news.kv_transfer_params)
        lookups = self._connector.take_stats().to_wire("p2p")
        counts = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
        row["connector"] = [lookups[name] for name in counts]
        row["sources"] = lookups["hits_by_source"]
        row["fetch"] = self._connector.stages.to_wire()


class _Counted:
    """A scheduler whose transfers end after so many results."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.patience: dict[str, tuple[int, int]] = {}
        self.results: list[StepResult] = []
        self._scheduler = scheduler
        self._left: dict[TokenSequence, int] = {}

    @property
    def has_requests(self) -> bool:
        # A real engine goes on for as long as somebody that has ended holds blocks.
        return self._scheduler.has_requests or any(sequence.is_finished for sequence in self._left)

    def schedule(self, now: float = 0.0) -> Step:
        step = self._scheduler.schedule(now)
        self._left |= {sequence: self.patience[sequence.request_id][0] for sequence in step.loading}
        return step

    def update(self, step: Step) -> StepResult:
        result = self._scheduler.update(step)
        self.results.append(result)
        for sequence, left in list(self._left.items()):
            if left > 1:
                self._left[sequence] = left - 1
                continue
            del self._left[sequence]
            if sequence.kv_transfer is not None and sequence.kv_transfer.num_kept_blocks:
                self._scheduler.release(sequence)
            else:
                self._scheduler.end_load(sequence)
        self._left |= {sequence: self.patience[sequence.request_id][1] for sequence in result.kept}
        return result


def _without_numbers(params: Mapping[str, object]) -> dict[str, Json]:
    groups: Json = params["remote_block_ids"]
    return {**params, "remote_block_ids": [len(group) for group in groups]}
