# SPDX-License-Identifier: Apache-2.0
"""Pauses: what becomes of requests in flight and of new ones, and when a pause is complete (protocol section 8.2).

    mode    in flight          new, by pause_generation    new, by pause_scheduler or sleep
    abort   end with ABORT     refused, may be retried     wait
    wait    run to their end   refused, may be retried     wait
    keep    stay as they are   wait                        wait

A pause is complete when nothing is left to be stepped; only then is it answered, and caches are cleared. Clearing them
takes the blocks of requests that were kept: resumed, these are computed anew.
"""

from collections.abc import Callable, Sequence
from typing import Final

from mockengine.engine.answers import Answering, Say, UntilIdle, UtilityError
from mockengine.engine.outgoing import Outbound
from mockengine.engine.runner import Runner
from mockengine.engine.scheduler import PauseState
from mockengine.wire.outputs import RequestError

ENGINE_PAUSED: Final = RequestError(
    "engine_paused", "Generation is paused. Please retry after it resumes.", retryable=True
)
"""What a request meets that comes during a pause which refuses new ones; frontends of 0.33 make it an HTTP 503."""
RESET_FAILED: Final = (
    "Failed to reset KV cache even when all the running requests are preempted and moved to the waiting queue. This is "
    "likely due to the presence of running requests waiting for remote KV transfer, which is not supported yet."
)
_STILL_PAUSING: Final = (
    "resume_scheduler called while pause is still in flight. Wait for the pause future to resolve before resuming."
)
_MODES: Final = ("abort", "wait", "keep")
# What a caller sent is said again in part only.
_ECHOED_CHARACTERS: Final = 256


class Pausing:
    """Whether a rank is paused, and how.

    Attributes:
        rejects_new: whether new requests are refused rather than kept waiting.

    """

    def __init__(
        self, runner: Runner, abort_all: Callable[[float], Sequence[Outbound]], *, waits_for_others: bool
    ) -> None:
        """Begin without a pause.

        Args:
            runner: whom it stops.
            abort_all: ends every request at a time; returns what clients are told of that.
            waits_for_others: whether ranks pause together, as those of a mixture of experts do: a pause that is not
                complete cannot be ended then.

        """
        self.rejects_new = False
        self._runner = runner
        self._abort_all = abort_all
        self._waits_for_others = waits_for_others
        self._num_incomplete = 0

    @property
    def is_paused(self) -> bool:
        """Whether there is a pause, be it complete or not."""
        return self._runner.pause_state is not PauseState.UNPAUSED

    def pause_generation(self, mode: object, clear_cache: object, now: float) -> Answering:
        """Pause as a user wants it: unless requests are kept, new ones are refused."""
        answering = self.pause(mode, clear_cache, now)
        self.rejects_new = mode != "keep"
        return answering

    def pause(self, mode: object, clear_cache: object, now: float) -> Answering:
        """Pause; complete when nothing is left to be stepped.

        Args:
            mode: `abort`, `wait` or `keep`.
            clear_cache: whether nothing is to be cached afterwards.
            now: the time, in engine seconds.

        Raises:
            UtilityError: no such mode.

        """
        if mode not in _MODES:
            raise UtilityError(f"Invalid pause mode: {str(mode)[:_ECHOED_CHARACTERS]}")
        return self._pausing(mode, clear_cache=bool(clear_cache), now=now)

    def resume(self, now: float) -> None:
        """End the pause, if there is one.

        Raises:
            UtilityError: other ranks may still be on their way into it.

        """
        if self._waits_for_others and self._num_incomplete:
            raise UtilityError(_STILL_PAUSING)
        self.rejects_new = False
        self._runner.pause(PauseState.UNPAUSED, now)

    def clear_caches(self, now: float) -> None:
        """Forget whatever is cached, and preempt whom that would leave without blocks.

        Raises:
            UtilityError: blocks are in use that cannot be taken.

        """
        if not self._runner.reset_prefix_cache(now, reset_running=True, reset_connector=True):
            raise UtilityError(RESET_FAILED)

    def _pausing(self, mode: object, *, clear_cache: bool, now: float) -> Answering:
        if mode == "abort":
            yield Say(self._abort_all(now))
        self._runner.pause(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW, now)
        self._num_incomplete += 1
        now = yield UntilIdle()
        self._num_incomplete -= 1
        if clear_cache:
            self.clear_caches(now)
