# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: which sequence holds how many blocks, and which blocks can be hit.

A block is *named* once it is full, by a hash of its tokens and all before them, and can be hit from then on, which is
before it is computed. Free blocks are handed out in a fixed order: those without a name first, then named ones, least
recently used first and of one sequence the last first. So blocks without a name need no identity; they are counted.

Two blocks may have the same name, since a sequence keeps the blocks it has. The oldest of them is the one that is hit.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from mockengine.engine.block_hash import Block
from mockengine.engine.sequences import TokenSequence
from mockengine.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from mockengine.wire.stats import PrefixCacheStats

_NO_STATS: Final = PrefixCacheStats()
# Names that are computed ahead of the first miss are computed for little.
_HASHES_AT_FIRST: Final = 4
_SPEC_KIND: Final = "full_attention"


@dataclass(slots=True, eq=False)
class DetachedBlocks:
    """Blocks that their sequence holds no longer, and that are not free yet."""

    named_blocks: list[Block]
    num_blocks: int


class KVCache:
    """The blocks of one engine.

    Attributes:
        num_gpu_blocks: all blocks; one of them is never handed out, as in vLLM.
        block_size: in tokens.
        enable_prefix_caching: whether blocks get names.

    """

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        enable_kv_cache_events: bool = False,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_nameless_free = num_gpu_blocks - 1
        self._named_free: OrderedDict[Block, None] = OrderedDict()
        self._by_hash: dict[int, Block] = {}
        # Further blocks of the same name, oldest first.
        self._twins: dict[int, OrderedDict[Block, None]] = {}
        self._events: list[KVCacheEvent] | None = [] if enable_kv_cache_events else None
        self._stats = _NO_STATS
        # Blocks that a fault has taken.
        self._occupied = DetachedBlocks([], 0)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can have."""
        return self.num_gpu_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; those among them with a name can be hit until they are given away."""
        return self._num_nameless_free + len(self._named_free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.num_usable_blocks - self.num_free_blocks

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        usable = self.num_usable_blocks
        return 1.0 - self.num_free_blocks / usable if usable else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def block_hashes(self) -> dict[int, int]:
        """Return the names that can be hit, and how many blocks have each."""
        return {name: 1 + len(self._twins.get(name, ())) for name in self._by_hash}

    # For the scheduler.

    def find(self, sequence: TokenSequence) -> list[Block]:
        """Return the longest run of a sequence's first blocks that is cached, at least one token being left over."""
        hits: list[Block] = []
        if not self.enable_prefix_caching or sequence.skip_reading_prefix_cache:
            return hits
        by_hash, hashes, block_size = self._by_hash, sequence.hashes, self.block_size
        names = hashes.known
        for index in range((sequence.num_tokens - 1) // block_size):
            if index == len(names):
                most = (sequence.num_tokens - 1) // block_size
                hashes.first(min(2 * index + _HASHES_AT_FIRST, most), block_size)
            block = by_hash.get(names[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def admit(self, sequence: TokenSequence, hits: list[Block], num_tokens: int) -> bool:
        """Give a sequence without blocks the ones it hits and, up to `num_tokens`, new ones.

        Returns:
            False, with nothing changed, if not all tokens it has would fit.

        """
        free = self.num_free_blocks
        needed = self.blocks_for(sequence.num_tokens) - len(hits)
        # Hits that nobody holds are free blocks too.
        if needed > free or needed + sum(not block.num_holders for block in hits) > free:
            return False
        self._hold(sequence, hits)
        return self.extend(sequence, num_tokens)

    def admit_to_load(self, sequence: TokenSequence, hits: list[Block], num_tokens: int, num_reserved: int) -> bool:
        """Give a sequence blocks likewise, to load into the new ones: these have no names until that is done.

        Args:
            sequence: without blocks.
            hits: the blocks it hits.
            num_tokens: those it hits and those that are loaded.
            num_reserved: free blocks that others count on.

        Returns:
            False, with nothing changed, if they would not fit.

        """
        needed = self.blocks_for(num_tokens) - len(hits) + sum(not block.num_holders for block in hits)
        if needed > self.num_free_blocks - num_reserved:
            return False
        self._hold(sequence, hits)
        return self._give(sequence, self.blocks_for(num_tokens) - len(hits))

    def extend(self, sequence: TokenSequence, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        """Give a sequence blocks for so many tokens and name those that are full of known ones.

        Args:
            sequence: whose blocks they are.
            num_tokens: all that are computed.
            num_lookahead_tokens: tokens after them for which there are to be blocks as well.

        Returns:
            False, with nothing changed, if there are too few.

        """
        missing = num_tokens + num_lookahead_tokens - sequence.num_blocks * self.block_size
        if missing > 0 and not self._give(sequence, self.blocks_for(missing)):
            return False
        self.name_blocks(sequence, num_tokens)
        return True

    def name_blocks(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Name the blocks that are full with those of the first `num_tokens` tokens that are known."""
        named, block_size = sequence.named_blocks, self.block_size
        num_tokens = min(num_tokens, sequence.num_tokens)
        if self.enable_prefix_caching:
            first, end = len(named), num_tokens // block_size
            if first < end:
                for name in sequence.hashes.first(end, block_size)[first:end]:
                    block = Block(name)
                    if self._by_hash.setdefault(name, block) is not block:
                        self._twins.setdefault(name, OrderedDict())[block] = None
                    named.append(block)
                if self._events is not None:
                    self._events.append(self._stored(sequence, first, end))
            sequence.names_next_at = (len(named) + 1) * block_size
        # With that many tokens it has to come here again.
        sequence.needs_cache_at = min(sequence.names_next_at, sequence.num_blocks * block_size + 1)

    def free(self, holder: TokenSequence | DetachedBlocks) -> None:
        """Take all blocks from a sequence, or free those it had; named ones can still be hit."""
        self._num_nameless_free += holder.num_blocks - len(holder.named_blocks)
        for block in reversed(holder.named_blocks):
            block.num_holders -= 1
            if not block.num_holders:
                self._named_free[block] = None
        holder.named_blocks = []
        holder.num_blocks = 0

    def detach(self, sequence: TokenSequence) -> DetachedBlocks:
        """Take all blocks from a sequence, and have them freed later."""
        blocks = DetachedBlocks(sequence.named_blocks, sequence.num_blocks)
        sequence.named_blocks = []
        sequence.num_blocks = 0
        return blocks

    def occupy(self, share: float) -> None:
        """Have that share of all blocks held by nobody, as far as they are free; 0 frees them again."""
        self.free(self._occupied)
        count = min(round(share * self.num_usable_blocks), self.num_free_blocks)
        self._take_names(max(0, count - self._num_nameless_free))
        self._num_nameless_free -= count
        self._occupied.num_blocks = count

    def reset(self) -> bool:
        """Forget all names; possible only while no sequence holds a block."""
        if self.num_used_blocks:
            return False
        self._named_free.clear()
        self._num_nameless_free = self.num_usable_blocks
        self._by_hash.clear()
        self._twins.clear()
        self._stats = replace(self._stats, reset=True)
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        return True

    # For those who report.

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return what has happened to names since the last call, if events are enabled."""
        if not self._events:
            return ()
        events = tuple(self._events)
        self._events.clear()
        return events

    def take_stats(self) -> PrefixCacheStats:
        """Return queries and hits since the last call."""
        stats, self._stats = self._stats, _NO_STATS
        return stats

    def _hold(self, sequence: TokenSequence, hits: list[Block]) -> None:
        for block in hits:
            if not block.num_holders:
                del self._named_free[block]
            block.num_holders += 1
        sequence.named_blocks = hits.copy()
        sequence.num_blocks = len(hits)
        self._record(sequence, len(hits) * self.block_size)

    def _give(self, sequence: TokenSequence, new: int) -> bool:
        """Give a sequence so many blocks; False, with nothing changed: there are too few."""
        if new > self._num_nameless_free:
            if new > self.num_free_blocks:
                return False
            self._take_names(new - self._num_nameless_free)
        self._num_nameless_free -= new
        sequence.num_blocks += new
        return True

    def _take_names(self, count: int) -> None:
        """Take the names from so many free blocks, those that went unused for longest."""
        for _ in range(count):
            block, _ = self._named_free.popitem(last=False)
            self._num_nameless_free += 1
            self._forget(block)
            if self._events is not None:
                self._events.append(BlockRemoved(block_hashes=(block.block_hash,), group_idx=0))

    def _forget(self, block: Block) -> None:
        name = block.block_hash
        twins = self._twins.get(name)
        if twins is None:
            del self._by_hash[name]
            return
        if self._by_hash[name] is block:
            self._by_hash[name], _ = twins.popitem(last=False)
        else:
            del twins[block]
        if not twins:
            del self._twins[name]

    def _record(self, sequence: TokenSequence, num_hit_tokens: int) -> None:
        if not self.enable_prefix_caching or sequence.skip_reading_prefix_cache:
            return
        is_resumed = sequence.num_preemptions > 0
        self._stats = self._stats.with_lookup(sequence.num_tokens, num_hit_tokens, is_resumed=is_resumed)

    def _stored(self, sequence: TokenSequence, first: int, end: int) -> BlockStored:
        names, lora = sequence.hashes.known, sequence.lora_request
        start = first * self.block_size
        return BlockStored(
            block_hashes=tuple(names[first:end]),
            parent_block_hash=names[first - 1] if first else None,
            token_ids=tuple(sequence.tokens(start, end * self.block_size - start)),
            block_size=self.block_size,
            lora_id=lora.int_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=tuple(sequence.hashes.extra_keys(block, self.block_size) for block in range(first, end)),
            group_idx=0,
            kv_cache_spec_kind=_SPEC_KIND,
        )
