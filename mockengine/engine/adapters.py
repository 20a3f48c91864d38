# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a rank, as vLLM's workers keep them.

An adapter is *loaded* while the host's memory holds it, which has room for `max_cpu_loras`, and *active* while it is in
one of the `max_loras` slots of the GPU. Whoever needs room takes that of the adapter that went unused for longest and
is not pinned. A request whose adapter is not loaded, or not any more, has it loaded: it names the path itself.

Every step uses the adapters of all that run. Steps do not tell so here: before a call looks or changes anything, the
adapters of those who run count as used just now, and are loaded if they are not, which comes to the same.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final

from mockengine.engine.answers import Answering, Busy, UtilityError
from mockengine.engine.config import LoraConfig
from mockengine.wire.codec import WireError
from mockengine.wire.requests import LoraRequest, read_lora_request
from mockengine.wire.values import shown

_ALL_PINNED: Final = "All items are pinned, cannot remove oldest from the cache."


class _Cache:
    """Ids of so many adapters, the one that went unused for longest first."""

    def __init__(self, capacity: int) -> None:
        self.ids: OrderedDict[int, None] = OrderedDict()
        self.pinned: set[int] = set()
        self._capacity = capacity

    @property
    def is_stuck(self) -> bool:
        """Whether it is full of pinned ones."""
        return len(self.ids) >= self._capacity and self.ids.keys() <= self.pinned

    def use(self, lora_id: int) -> None:
        """Put one in, or note that it is used; raises UtilityError: there is no room, and none can go."""
        if lora_id not in self.ids and len(self.ids) >= self._capacity:
            if self.is_stuck:
                raise UtilityError(_ALL_PINNED)
            self.remove(next(each for each in self.ids if each not in self.pinned))
        self.ids[lora_id] = None
        self.ids.move_to_end(lora_id)

    def remove(self, lora_id: int) -> bool:
        """Take one out, pinned or not; tell whether it was there."""
        self.pinned.discard(lora_id)
        is_here = lora_id in self.ids
        self.ids.pop(lora_id, None)
        return is_here


class Adapters:
    """The adapters of one rank.

    Attributes:
        load_s: what loading one takes, in seconds.
        in_use: tells which adapters those have who run.

    """

    def __init__(self, config: LoraConfig) -> None:
        self.load_s = config.load_s
        self.in_use: Callable[[], Iterable[LoraRequest]] = tuple
        self._is_there = config.is_there
        self._loaded = _Cache(config.max_cpu_loras)
        self._active = _Cache(config.max_loras)

    # For requests.

    def problem(self, lora: LoraRequest) -> str | None:
        """Return why a request cannot have its adapter, if it cannot."""
        if lora.int_id not in self._loaded.ids:
            if not self._is_there(lora.path):
                return _not_found(lora)
            if self._loaded.is_stuck:
                return _ALL_PINNED
        return _ALL_PINNED if lora.int_id not in self._active.ids and self._active.is_stuck else None

    def use(self, lora: LoraRequest) -> float:
        """Have an adapter in a slot; return how long that takes, in seconds."""
        is_loaded = lora.int_id in self._loaded.ids
        try:
            self._load(lora.int_id)
        except UtilityError:
            # Others were pinned since the request was accepted. A real engine would end.
            return 0.0
        return 0.0 if is_loaded else self.load_s

    # For calls.

    def add(self, value: Any) -> Answering:
        """Load an adapter, unless it is loaded and not to be loaded again; return true."""
        lora = _read(value)
        self._catch_up()
        if lora.load_inplace or lora.int_id not in self._loaded.ids:
            if not self._is_there(lora.path):
                raise UtilityError(_not_found(lora))
            yield Busy(self.load_s)
            self._remove(lora.int_id)
        self._load(lora.int_id)
        return True

    def remove(self, value: object) -> bool:
        """Forget an adapter; tell whether it was loaded."""
        lora_id = _read_id(value)
        self._catch_up()
        return self._remove(lora_id)

    def pin(self, value: object) -> bool:
        """Keep an adapter from having to go; return true.

        Raises:
            UtilityError: it is not loaded, or no slot is free for it.

        """
        lora_id = _read_id(value)
        self._catch_up()
        if lora_id not in self._loaded.ids:
            raise UtilityError(f"Pinning failed. LoRA {lora_id} is not registered.")
        self._active.use(lora_id)
        self._loaded.pinned.add(lora_id)
        self._active.pinned.add(lora_id)
        return True

    def ids(self) -> list[int]:
        """Return which adapters are loaded."""
        self._catch_up()
        return sorted(self._loaded.ids)

    def _catch_up(self) -> None:
        """Do what steps have done meanwhile."""
        for lora in self.in_use():
            self.use(lora)

    def _load(self, lora_id: int) -> None:
        # One that has to go may stay in a slot, as nobody can tell: it is the first to leave that too.
        self._loaded.use(lora_id)
        self._active.use(lora_id)

    def _remove(self, lora_id: int) -> bool:
        self._active.remove(lora_id)
        return self._loaded.remove(lora_id)


def _not_found(lora: LoraRequest) -> str:
    return f"Loading lora {lora.name} failed: No adapter found for {lora.path}"


def _read(value: Any) -> LoraRequest:
    try:
        lora = read_lora_request(value, "lora_request")
    except WireError as error:
        raise UtilityError(str(error)) from error
    if lora.int_id < 1:
        raise UtilityError(f"id must be > 0, got {lora.int_id}")
    if not lora.path:
        raise UtilityError("lora_path cannot be empty")
    return lora


def _read_id(value: object) -> int:
    if not isinstance(value, int):
        raise UtilityError(f"lora_id: {shown(value)} where an int is expected")
    if value < 1:
        raise UtilityError("lora_id must be greater than 0.")
    return value
