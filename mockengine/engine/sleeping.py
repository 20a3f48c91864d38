# SPDX-License-Identifier: Apache-2.0
"""Sleep: which memory of a rank's workers is gone, and how it comes back (protocol section 8.3).

Level 0 is a pause and nothing else. Level 1 offloads the weights and drops the KV cache, level 2 drops both. Memory is
known by tags, which may wake up one by one; requests go on when all of it is there again.
"""

from typing import Final

from mockengine.engine.answers import Answering, Busy, UtilityError
from mockengine.engine.pausing import Pausing
from mockengine.engine.runner import Runner
from mockengine.engine.weights import Weights
from mockengine.wire.values import shown

_MEMORY: Final = frozenset({"weights", "kv_cache"})
# Names no memory but the pause, and is the tag with which level 0 is left.
_SCHEDULING: Final = "scheduling"
_DROPS_WEIGHTS: Final = 2
_NOT_PAUSED: Final = "release_kv_cache_memory() requires a completed pause first"
_NOT_RESIDENT: Final = "release_kv_cache_memory() requires all executor memory to be resident"


class Sleeping:
    """The memory of one rank, and its way to sleep and back."""

    def __init__(self, pausing: Pausing, runner: Runner, weights: Weights, *, sleep_s: float, wake_up_s: float) -> None:
        """Begin awake.

        Args:
            pausing: what goes before any sleep.
            runner: tells whether a pause is complete.
            weights: what level 2 drops.
            sleep_s: what falling asleep takes, in seconds.
            wake_up_s: what waking up takes, be it of a part.

        """
        self._pausing = pausing
        self._runner = runner
        self._weights = weights
        self._sleep_s = sleep_s
        self._wake_up_s = wake_up_s
        self._asleep: frozenset[str] = frozenset()

    @property
    def is_sleeping(self) -> bool:
        """Whether the rank is paused, or memory is gone."""
        return self._pausing.is_paused or bool(self._asleep)

    def sleep(self, level: object, mode: object, now: float) -> Answering:
        """Pause, then give memory up; once more is a pause alone."""
        depth = _read_level(level)
        yield from self._pausing.pause(mode, depth > 0, now)
        if not depth or "weights" in self._asleep:
            return
        yield Busy(self._sleep_s)
        self._asleep |= _MEMORY
        if depth == _DROPS_WEIGHTS:
            self._weights.drop()

    def wake_up(self, tags: object, now: float) -> Answering:
        """Get memory back, that of some tags or all; return whether all of it is there, which ends the pause too."""
        wanted = _read_tags(tags)
        woken = self._asleep if wanted is None else frozenset(wanted)
        # As a real engine: a tag that does not sleep spoils the whole call, silently.
        if woken and woken <= self._asleep:
            now = yield Busy(self._wake_up_s)
            self._asleep -= woken
        if not self._asleep:
            self._pausing.resume(now)
        return not self._asleep

    def release_kv_cache_memory(self, now: float) -> None:
        """Give up the memory of the KV cache.

        Raises:
            UtilityError: the rank is not paused or still at work, or memory is gone already.

        """
        if not (self._pausing.is_paused and self._runner.is_idle):
            raise UtilityError(_NOT_PAUSED)
        if self._asleep:
            raise UtilityError(_NOT_RESIDENT)
        self._pausing.clear_caches(now)
        self._asleep = frozenset({"kv_cache"})


def _read_level(value: object) -> int:
    if not isinstance(value, int) or value not in (0, 1, 2):
        raise UtilityError(f"level: {shown(value)} where 0, 1 or 2 is expected")
    return value


def _read_tags(value: object) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(tag, str) for tag in value):
        raise UtilityError(f"tags: {shown(value)} where a list of names is expected, such as weights and kv_cache")
    return [tag for tag in value if tag != _SCHEDULING]
