# SPDX-License-Identifier: Apache-2.0
"""What the engine remembers of images, sounds and videos, whose data a Python frontend sends once.

After that the frontend names an item by its hash and leaves out the data, as long as it believes that the engine has
them. If it has not, the request fails and tells the hashes; the frontend then sends them with the data again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from mockengine.replies.hashing import draw
from mockengine.wire.requests import MultiModalFeature

_KEY_BYTES: Final = 8
_DRAWS: Final = 2**64
# Of so many items it is known how often they have been named, on which the draw of a miss depends.
_MOST_COUNTED: Final = 2**16


@dataclass(frozen=True, slots=True)
class MmCacheConfig:
    """What is remembered.

    Attributes:
        items: how many items, those used last; 0 is all that frontends believe to be here.
        miss_rate: share of items named without data that are missed although they are here.
        seed: decides which.

    """

    items: int = 0
    miss_rate: float = 0.0
    seed: int = 0


class MmCache:
    """The items of one rank; their data are not kept, nor are their hashes, which clients choose."""

    def __init__(self, config: MmCacheConfig) -> None:
        """Begin with nothing."""
        self._config = config
        self._seed = config.seed.to_bytes(_KEY_BYTES, "little")
        self._known: OrderedDict[int, None] = OrderedDict()
        self._times_named: OrderedDict[int, int] = OrderedDict()

    def missing(self, features: Sequence[MultiModalFeature]) -> tuple[str, ...]:
        """Take in the items of a request that come with data; return the hashes of those that are missed."""
        if not self._config.items and not self._config.miss_rate:
            return ()
        # As in vLLM, what an item is remembered by.
        named = {feature.mm_hash or feature.identifier: feature.has_data for feature in features}
        keys = {name: self._key(name) for name in named}
        for key in keys.values():
            # What a request names itself is not what makes room for others of it.
            if key in self._known:
                self._known.move_to_end(key)
        missed = tuple(name for name, has_data in named.items() if not has_data and self._is_missed(keys[name]))
        for name in missed:
            self._known.pop(keys[name], None)
        if self._config.items:
            self._known |= {keys[name]: None for name, has_data in named.items() if has_data}
            while len(self._known) > self._config.items:
                self._known.popitem(last=False)
        return missed

    def reset(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._times_named.clear()

    def _is_missed(self, key: int) -> bool:
        if self._config.items and key not in self._known:
            return True
        if not self._config.miss_rate:
            return False
        times = self._times_named.pop(key, 0)
        self._times_named[key] = times + 1
        if len(self._times_named) > _MOST_COUNTED:
            self._times_named.popitem(last=False)
        return draw(key, times) < self._config.miss_rate * _DRAWS

    def _key(self, name: str) -> int:
        digest = blake2b(name.encode("utf-8", "surrogatepass"), key=self._seed, digest_size=_KEY_BYTES)
        return int.from_bytes(digest.digest(), "little")
