# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of a request: how long it is, where it stands, and what its blocks are named after.

It knows how to ask for token ids, which only the names of blocks depend on, and nothing of clients and outputs.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol, TypeAlias

from mockengine.engine.block_hash import Block, BlockHashes
from mockengine.engine.kv_transfer import KvTransfer
from mockengine.wire.outputs import EngineCoreEvent
from mockengine.wire.requests import LoraRequest, MultiModalFeature

TokenReader: TypeAlias = Callable[[int, int], Sequence[int]]
"""Gives so many token ids from a position on; prompt and outputs are numbered through."""


class Verifier(Protocol):
    """Decides on the drafts of a sequence."""

    def verify(self, position: int, num_drafts: int) -> int:
        """Return how many of the drafts of the output that begins at a position of the reply are accepted."""

    def reject(self, num_drafts: int) -> None:
        """Hear of drafts of which none is accepted."""


class _NoDrafts:
    """Decides on nothing."""

    def verify(self, position: int, num_drafts: int) -> int:  # noqa: ARG002 - the interface's
        """Accept nothing."""
        return 0

    def reject(self, num_drafts: int) -> None:
        """Do nothing."""


NO_DRAFTS: Final[Verifier] = _NoDrafts()

NEVER: Final = sys.maxsize
"""A number of tokens that no sequence reaches."""


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    PAUSED = auto()
    FINISHED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class TokenSequence:
    """A request as the scheduler sees it.

    Attributes:
        request_id: names it.
        num_prompt_tokens: at least 1.
        max_tokens: output tokens that it may have, which a scheduler knows in advance; at least 1.
        stops_after: output tokens after which it ends, by a stop token that no scheduler foresees or by `max_tokens`.
            May be changed as long as it has not come to that.
        tokens: gives its token ids.
        priority: under the priority policy the smallest goes first.
        arrival_time: decides between equal priorities.
        lora_request: the adapter, whose name and path are part of its blocks' names.
        cache_salt: set, it shares blocks with requests of the same salt only.
        mm_features: images and the like in its prompt, by offset.
        skip_reading_prefix_cache: it computes its whole prompt, whatever is cached.
        kv_transfer: its part in prefill/decode disaggregation, where there is a connector.
        is_resumable: when it has said its last token it waits for more of its prompt instead of ending.
        is_blocked: it is not admitted, as while its grammar is compiled, or stays where it is, if it runs.
        leaves_a_token: its admission leaves its last token to be computed, so that its next output comes when it is
            scheduled again.
        verifier: decides on its drafts, with speculative decoding.

        status: where it is.
        num_tokens: prompt and outputs whose results have arrived.
        num_computed_tokens: tokens whose computation has begun.
        num_output_placeholders: output tokens that are being computed.
        num_draft_tokens: drafts that its next step verifies.
        num_preemptions: how often it lost its blocks.
        num_cached_tokens: prompt tokens found in the cache when it was first admitted, or computed when it was resumed.
        waits_with_blocks: it waits and holds blocks, so it goes before others that wait.
        events: what happened to it since its last output.

    The remaining attributes belong to the scheduler and the cache.

    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    stops_after: int
    tokens: TokenReader
    priority: int = 0
    arrival_time: float = 0.0
    lora_request: LoraRequest | None = None
    cache_salt: str | None = None
    mm_features: tuple[MultiModalFeature, ...] = ()
    skip_reading_prefix_cache: bool = False
    kv_transfer: KvTransfer | None = None
    is_resumable: bool = False
    is_blocked: bool = False
    leaves_a_token: bool = False
    verifier: Verifier = NO_DRAFTS

    status: Status = field(default=Status.WAITING, init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_output_placeholders: int = field(default=0, init=False)
    num_draft_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    waits_with_blocks: bool = field(default=False, init=False)
    events: list[EngineCoreEvent] = field(default_factory=list, init=False)

    # Tokens that it has when it may have no more.
    limit: int = field(init=False)
    # Whether its next output has nothing to say but tokens, unless it is the last one.
    is_plain: bool = field(default=False, init=False)
    has_said_something: bool = field(default=False, init=False)
    # Results of steps up to this one were on their way when it was preempted; dropped, they are computed again.
    stale_through: int = field(default=0, init=False)
    drops_stale: bool = field(default=False, init=False)

    # Its first blocks are named and may be hit; those after them, up to `num_blocks`, are not full yet.
    named_blocks: list[Block] = field(default_factory=list, init=False)
    num_blocks: int = field(default=0, init=False)
    # Tokens with which the next block gets its name, and tokens with which the cache has to be asked for anything.
    names_next_at: int = field(default=NEVER, init=False)
    needs_cache_at: int = field(default=0, init=False)
    hashes: BlockHashes = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens
        self.limit = self.num_prompt_tokens + self.max_tokens
        self.hashes = BlockHashes(self.tokens, self.lora_request, self.cache_salt, self.mm_features)

    def continue_as(self, other: "TokenSequence") -> None:
        """Go on, being paused, with the prompt and the limits of another one that begins with what is computed."""
        self.num_prompt_tokens, self.num_tokens = other.num_prompt_tokens, other.num_tokens
        self.max_tokens, self.stops_after, self.limit = other.max_tokens, other.stops_after, other.limit
        self.tokens, self.mm_features, self.hashes = other.tokens, other.mm_features, other.hashes
        self.is_resumable = other.is_resumable
        self.is_blocked = other.is_blocked
        self.status = Status.WAITING

    @property
    def num_output_tokens(self) -> int:
        """Output tokens whose results have arrived."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, by itself or aborted."""
        return self.status is Status.FINISHED
