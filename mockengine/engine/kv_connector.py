# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of vLLM's NixlConnector: whose prompt is loaded, whose blocks are kept, and what is answered.

Nothing is moved, and other instances are not spoken to. How long a transfer takes is told here, when one ends is not: a
connector reads no clock.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from heapq import heappop, heappush

from mockengine.engine.block_hash import Block
from mockengine.engine.config import KvTransferConfig
from mockengine.engine.kv_transfer import FetchStage
from mockengine.engine.sequences import TokenSequence
from mockengine.wire.stats import KvFetchStages, PrefillStats, PrefixCacheStats


class KvConnector:
    """The connector of one rank.

    Attributes:
        engine_id: names the rank towards other instances.
        port: its side channel's, where nothing listens.
        must_deliver: whether a request must not end without its blocks.
        must_not_overtake: whether blocks must not be loaded into that a step under way may write into.

    """

    def __init__(self, config: KvTransferConfig, rank: int, data_parallel_size: int) -> None:
        """Begin with nothing to transfer; ranks among others have a name and a port of their own, as in vLLM."""
        is_one_of_many = data_parallel_size > 1 or rank > 0
        self.engine_id = f"{config.engine_id}_dp{rank}" if is_one_of_many else config.engine_id
        self.port = config.side_channel_port + rank
        self.must_deliver = config.is_producer
        self.must_not_overtake = config.is_consumer
        self._config = config
        self._stages: Counter[FetchStage] = Counter()
        self._stats = PrefixCacheStats()
        # Numbers of blocks that are kept, of which other sequences may hold the same, and how many do.
        self._numbers: dict[Block, tuple[int, int]] = {}
        self._free_numbers: list[int] = []
        # Block 0 is the one that vLLM never hands out.
        self._next_number = 1

    # How long it takes.

    def load_s(self, num_tokens: int) -> float:
        """Return what the transfer of so many tokens takes, in seconds."""
        return self._config.transfer_s + num_tokens * self._config.transfer_s_per_token

    def keep_s(self, num_tokens: int) -> float:
        """Return for how long blocks of so many tokens are kept, in seconds: until they are asked for, and moved."""
        return self._config.hold_s + self.load_s(num_tokens)

    # Loading.

    def loads(self, sequence: TokenSequence) -> bool:
        """Tell whether all of a prompt is loaded that is not cached here."""
        transfer = sequence.kv_transfer
        return transfer is not None and transfer.do_remote_prefill and not sequence.skip_reading_prefix_cache

    def admitted(self, sequence: TokenSequence, num_local_tokens: int, num_external_tokens: int) -> None:
        """Note that a sequence got blocks: for so many tokens that are cached here, and so many that are loaded."""
        queries = sequence.num_tokens - num_local_tokens
        is_resumed = sequence.num_preemptions > 0
        self._stats = self._stats.with_lookup(queries, num_external_tokens, is_resumed=is_resumed)
        if sequence.kv_transfer is not None:
            sequence.kv_transfer.do_remote_prefill = False
            sequence.kv_transfer.num_external_tokens += num_external_tokens

    def move(self, sequence: TokenSequence, stage: FetchStage) -> None:
        """Note how far the loading of a sequence is."""
        if sequence.kv_transfer is not None:
            self._stages[sequence.kv_transfer.stage] -= 1
            self._stages[stage] += 1
            sequence.kv_transfer.stage = stage

    # Keeping.

    def finished(
        self, sequence: TokenSequence, block_size: int, prefill_stats: PrefillStats | None
    ) -> Mapping[str, object] | None:
        """Return what is answered to a request that has said its last token, or None.

        If it has `num_kept_blocks` then, its blocks are to be kept until `released`.

        Args:
            sequence: of the request.
            block_size: tokens of a block.
            prefill_stats: of its prompt, if it has said but one output.

        """
        transfer = sequence.kv_transfer
        if transfer is None or not transfer.do_remote_decode:
            return None
        transfer.num_kept_blocks = min(-(-sequence.num_computed_tokens // block_size), sequence.num_blocks)
        params: dict[str, object] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [self._number_blocks(sequence, transfer.num_kept_blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": sequence.request_id,
            "remote_host": self._config.side_channel_host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.num_computed_tokens if transfer.num_kept_blocks else 0,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_registration_generation": 1,
        }
        if prefill_stats is not None:
            params["remote_prefill_cached_tokens"] = prefill_stats.num_cached_tokens
        return params

    def released(self, sequence: TokenSequence) -> None:
        """Note that the blocks of a sequence are not kept any longer."""
        transfer = sequence.kv_transfer
        if transfer is None:
            return
        for block in sequence.named_blocks[: transfer.num_kept_blocks]:
            number, holders = self._numbers.pop(block)
            if holders > 1:
                self._numbers[block] = number, holders - 1
            else:
                heappush(self._free_numbers, number)
        for number in transfer.own_numbers:
            heappush(self._free_numbers, number)
        transfer.own_numbers = ()
        transfer.num_kept_blocks = 0

    def _number_blocks(self, sequence: TokenSequence, count: int) -> list[int]:
        """Return numbers of the first blocks of a sequence; no two blocks that are kept have the same."""
        numbers = []
        for block in sequence.named_blocks[:count]:
            number, holders = self._numbers.get(block) or (self._take_number(), 0)
            self._numbers[block] = number, holders + 1
            numbers.append(number)
        own = tuple(self._take_number() for _ in range(count - len(numbers)))
        if sequence.kv_transfer is not None:
            sequence.kv_transfer.own_numbers = own
        return [*numbers, *own]

    def _take_number(self) -> int:
        if self._free_numbers:
            return heappop(self._free_numbers)
        self._next_number += 1
        return self._next_number - 1

    # What is reported.

    @property
    def stages(self) -> KvFetchStages:
        """How many requests are how far with loading."""
        return KvFetchStages(
            waiting_to_start=self._stages[FetchStage.WAITING_TO_START],
            in_progress=self._stages[FetchStage.IN_PROGRESS],
            completed_waiting=self._stages[FetchStage.COMPLETED_WAITING],
        )

    def reset(self) -> None:
        """Note that what other instances have cached was forgotten."""
        self._stats = replace(self._stats, reset=True)

    def take_stats(self) -> PrefixCacheStats:
        """Return queries and hits of what other instances have cached, since the call before."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats
