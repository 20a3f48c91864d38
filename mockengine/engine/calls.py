# SPDX-License-Identifier: Apache-2.0
"""Utility calls that are under way: when each goes on, and what is said of it.

Most are answered at once. One that waits for the rank to be idle lets everything else go on; one that keeps the rank
busy lets nothing go on, as vLLM's engine works on one thing at a time.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from mockengine.engine.answers import Answering, Busy, Say, UntilIdle, UtilityError
from mockengine.engine.control import Control
from mockengine.engine.outgoing import Outbound
from mockengine.wire.utility import UtilityCall, failure_message


@dataclass(slots=True)
class _UnderWay:
    """A call, the client whose socket it came from, and the rest of its answer."""

    call: UtilityCall
    arrived_from: int
    answering: Answering


class Calls:
    """The calls of one rank.

    Attributes:
        busy_until: when the call ends that keeps the rank busy, in engine seconds, or None.
        busy_s: how long it does so altogether.

    """

    def __init__(
        self,
        control: Control,
        reply: Callable[[UtilityCall, int, Any, str | None, float], Outbound],
        is_idle: Callable[[], bool],
    ) -> None:
        """Begin with none.

        Args:
            control: answers them.
            reply: makes the reply to a call that arrived on a client's socket, of its result or else of its failure,
                and the time.
            is_idle: tells whether nothing is left that may be stepped.

        """
        self.busy_until: float | None = None
        self.busy_s = 0.0
        self._control = control
        self._reply = reply
        self._is_idle = is_idle
        self._busy: _UnderWay | None = None
        self._waiting: list[_UnderWay] = []

    def begin(self, call: UtilityCall, arrived_from: int, now: float) -> list[Outbound]:
        """Answer a call, or begin to."""
        try:
            result = self._control.answer(call, now)
        except UtilityError as error:
            return [self._fail(call, arrived_from, str(error), now)]
        if isinstance(result, Generator):
            return self._go_on(_UnderWay(call, arrived_from, result), None, now)
        return [self._reply(call, arrived_from, result, None, now)]

    def end_busy(self, now: float) -> list[Outbound]:
        """Go on with the call that kept the rank busy until now."""
        under_way, self._busy, self.busy_until = self._busy, None, None
        return [] if under_way is None else self._go_on(under_way, now, now)

    def go_on(self, now: float) -> list[Outbound]:
        """Go on with the calls that wait for the rank to be idle, if it is; as in vLLM the last one goes first."""
        outbound: list[Outbound] = []
        while self._waiting and self._busy is None and self._is_idle():
            outbound += self._go_on(self._waiting.pop(), now, now)
        return outbound

    def give_up(self, reason: str, now: float) -> list[Outbound]:
        """Have every call fail that is under way."""
        under_way = [*self._waiting, *([] if self._busy is None else [self._busy])]
        self._waiting, self._busy, self.busy_until = [], None, None
        return [self._reply(each.call, each.arrived_from, None, reason, now) for each in under_way]

    def _go_on(self, under_way: _UnderWay, happened_at: float | None, now: float) -> list[Outbound]:
        """Go on with an answer as far as it gets; None: it begins."""
        outbound: list[Outbound] = []
        call, arrived_from, answering = under_way.call, under_way.arrived_from, under_way.answering
        try:
            awaited = next(answering) if happened_at is None else answering.send(happened_at)
            while True:
                match awaited:
                    case Say(messages):
                        outbound += messages
                    case Busy(seconds) if seconds > 0:
                        self._busy, self.busy_s, self.busy_until = under_way, seconds, now + seconds
                        return outbound
                    case UntilIdle() if not self._is_idle():
                        self._waiting.append(under_way)
                        return outbound
                awaited = answering.send(now)
        except StopIteration as ended:
            outbound.append(self._reply(call, arrived_from, ended.value, None, now))
        except UtilityError as error:
            outbound.append(self._fail(call, arrived_from, str(error), now))
        return outbound

    def _fail(self, call: UtilityCall, arrived_from: int, reason: str, now: float) -> Outbound:
        return self._reply(call, arrived_from, None, failure_message(call.method, reason), now)
