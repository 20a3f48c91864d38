# SPDX-License-Identifier: Apache-2.0
"""Named KV blocks. A name is 64 bits for a block's tokens, what else they depend on, and everything before them.

Equal names mean equal prefixes, on every machine and in every run, so that routers can compare ranks.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

from mockengine.wire.requests import LoraRequest, MultiModalFeature

_HASH_BYTES: Final = 8
_IS_BIG_ENDIAN: Final = sys.byteorder == "big"
# Sets what depends on keys apart from what has the same bytes as tokens.
_WITH_KEYS: Final = b"extra keys"


class Block:
    """A named block.

    Attributes:
        block_hash: its name.
        num_holders: sequences that hold it; nobody's block can be given away.

    """

    __slots__ = ("block_hash", "num_holders")

    def __init__(self, block_hash: int) -> None:
        self.block_hash = block_hash
        self.num_holders = 1


class BlockHashes:
    """The names of a sequence's full blocks, each computed when it is first asked for."""

    __slots__ = ("_block_size", "_features", "_features_of", "_lora_name", "_salt", "_state", "_tokens", "known")

    def __init__(
        self,
        tokens: Callable[[int, int], Sequence[int]],
        lora: LoraRequest | None,
        cache_salt: str | None,
        mm_features: tuple[MultiModalFeature, ...],
    ) -> None:
        self._tokens = tokens
        self._lora_name = lora.name if lora is not None else None
        self._salt = cache_salt or None
        self._features = mm_features
        self._features_of: dict[int, list[tuple[str, int]]] = {}
        self._block_size = 0
        # The hash of a block is that of all tokens up to its end, so what the first depends on, all do.
        self._state = blake2b(digest_size=_HASH_BYTES)
        if lora is not None or self._salt is not None:
            # The path too: a name may come to mean another adapter.
            self._depend_on((self._lora_name, lora.path if lora is not None else None, self._salt))
        self.known: list[int] = []

    def first(self, count: int, block_size: int) -> list[int]:
        """Return the names of the first blocks, at least `count` of them, whose tokens must be known."""
        known = self.known
        missing = count - len(known)
        if missing > 0:
            ids = array("I", self._tokens(len(known) * block_size, missing * block_size))
            if _IS_BIG_ENDIAN:
                ids.byteswap()
            if self._features:
                self._extend_with_features(memoryview(ids), block_size)
            elif missing == 1:
                # What a decode does now and then.
                self._state.update(ids)
                known.append(int.from_bytes(self._state.digest(), "big"))
            else:
                self._extend(memoryview(ids), block_size)
        return known

    def extra_keys(self, block: int, block_size: int) -> tuple[object, ...] | None:
        """Return what a block depends on beside tokens, in the form of KV events; None is nothing."""
        lora = (self._lora_name,) if self._lora_name is not None else ()
        salt = (self._salt,) if self._salt is not None and block == 0 else ()
        return (*lora, *self._reaching_into(block_size).get(block, ()), *salt) or None

    def _extend(self, ids: memoryview, block_size: int) -> None:
        state, known = self._state, self.known
        for start in range(0, len(ids), block_size):
            state.update(ids[start : start + block_size])
            known.append(int.from_bytes(state.digest(), "big"))

    def _extend_with_features(self, ids: memoryview, block_size: int) -> None:
        features_of = self._reaching_into(block_size)
        for start in range(0, len(ids), block_size):
            features = features_of.get(len(self.known))
            if features is not None:
                self._depend_on(features)
            self._extend(ids[start : start + block_size], block_size)

    def _depend_on(self, keys: object) -> None:
        data = self._state.digest() + repr(keys).encode("utf-8", "surrogatepass")
        self._state = blake2b(data, digest_size=_HASH_BYTES, person=_WITH_KEYS)

    def _reaching_into(self, block_size: int) -> dict[int, list[tuple[str, int]]]:
        """Return, by block, which features reach into it and where they begin, counted from the block's beginning."""
        if self._block_size != block_size:
            self._block_size = block_size
            self._features_of = {}
            for feature in self._features:
                end = feature.offset + feature.length
                for block in range(feature.offset // block_size, -(-end // block_size)):
                    entry = (feature.identifier, feature.offset - block * block_size)
                    self._features_of.setdefault(block, []).append(entry)
        return self._features_of
