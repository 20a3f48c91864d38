# SPDX-License-Identifier: Apache-2.0
"""The faults of one rank: what strikes its requests and calls, and what is done to its messages because of that.

Without rules all of this costs a look at an empty list per step.
"""

from collections.abc import Sequence

from mockengine.engine.dialect import Dialect
from mockengine.engine.outgoing import COORDINATOR, Outbound
from mockengine.faults.edits import WAVES, Edit, RequestEdit, SaidEnvelope
from mockengine.faults.injector import Injector
from mockengine.replies.asked import Asked
from mockengine.replies.wish import Wish
from mockengine.wire.utility import UtilityCall


class RankFaults:
    """What goes wrong on one rank."""

    def __init__(self, rank: int, injector: Injector, dialect: Dialect) -> None:
        """Begin with nothing to do.

        Args:
            rank: whose faults they are.
            injector: decides what strikes.
            dialect: of the frontend, which decides what is wrong for it.

        """
        self._rank = rank
        self._injector = injector
        self._dialect = dialect
        self._edits: list[Edit] = []
        self.now = 0.0

    def strike_request(self, asked: Asked, named: str | None) -> Wish | None:
        """Return what becomes of a request that arrives now, and take note of what is done to messages about it.

        Raises:
            ReplyError: its client names a rule that is none.

        """
        if named is None and not self._injector.has_rules:
            return None
        struck = self._injector.on_request(asked, self._rank, self.now, named)
        if struck is None:
            return None
        self._edits += struck.edits
        return struck.wish

    def strike_call(self, call: UtilityCall, now: float) -> None:
        """Take note of what is done to the answer to a call."""
        if self._injector.has_rules:
            self._edits += self._injector.on_call(call, self._rank, now)

    def make_wave_stale(self) -> None:
        """Have the coordinator hear of the next wave by the wrong number."""
        self._edits.append(_StaleWave())

    def forget(self, request_ids: Sequence[str]) -> None:
        """Do nothing more to messages about requests that nobody waits for any more."""
        if self._edits:
            gone = frozenset(request_ids)
            self._edits = [
                edit for edit in self._edits if not (isinstance(edit, RequestEdit) and edit.request_id in gone)
            ]

    def edited(self, outbound: list[Outbound]) -> list[Outbound]:
        """Return what is sent instead of what was to be sent."""
        if not self._edits:
            return outbound
        made = [self._edited_one(each) for each in outbound]
        self._edits = [edit for edit in self._edits if not edit.is_done]
        return [each for each in made if each.messages]

    def _edited_one(self, outbound: Outbound) -> Outbound:
        messages: list[list[bytes]] = []
        for frames in outbound.messages:
            # A burst says every message in the same buffers.
            said = [bytes(frame) for frame in frames]
            envelope = SaidEnvelope(said, self._dialect.line)
            for edit in self._edits:
                is_of_wave = isinstance(edit, _StaleWave)
                if (
                    not edit.is_done
                    and envelope.replacement is None
                    and is_of_wave == (outbound.destination == COORDINATOR)
                ):
                    edit.apply(envelope)
            messages += envelope.messages() if envelope.is_changed else [said]
        return Outbound(outbound.destination, messages)


class _StaleWave(Edit):
    def apply(self, envelope: SaidEnvelope) -> None:
        """Take one from the number of a wave, down to 0."""
        for position in WAVES:
            number = envelope.item(position)
            if number is not None:
                envelope.put(position, max(0, number - 1))
                self.is_done = True
