# SPDX-License-Identifier: Apache-2.0
"""Sequences whose requests have moments of their own, in an engine that steps.

Such a one has its prompt computed but for the last token as soon as there is room, and stays where it is until its
moment has come. Then it is scheduled again, and says something at the end of that step; until then it computes nothing
more. So it is late by what steps take, and what it says is never early.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from mockengine.engine.agenda import Agenda
from mockengine.engine.own_timing import Moments
from mockengine.engine.requests import Request
from mockengine.engine.sequences import Status, TokenSequence
from mockengine.engine.steps import Step, StepResult


@dataclass(slots=True, eq=False)
class _Member:
    """A sequence's request and moments, and how many of its outputs have arrived."""

    request: Request
    moments: Moments
    outputs: int = 0


class OwnSequences:
    """The sequences of one rank that have moments of their own.

    Attributes:
        members: these.

    """

    def __init__(self) -> None:
        """Begin with nobody."""
        self.members: dict[TokenSequence, _Member] = {}
        # When those may go on who stay where they are.
        self._agenda: Agenda[TokenSequence] = Agenda()
        self._staying: set[TokenSequence] = set()
        # What the last step took: so long an output takes that has no moment of its own.
        self._step_s = 0.0

    def add(self, sequence: TokenSequence, request: Request) -> None:
        """Take in a sequence, if its request has moments of its own."""
        if request.moments is not None:
            self.members[sequence] = _Member(request, request.moments)
            sequence.leaves_a_token = request.moments.waits_first

    def forget(self, sequence: TokenSequence) -> None:
        """Take no more notice of a sequence."""
        if self.members.pop(sequence, None) is not None:
            self._agenda.forget(sequence)
            self._staying.discard(sequence)

    def clear(self) -> None:
        """Take no more notice of any."""
        self.members.clear()
        self._agenda.clear()
        self._staying.clear()

    def stand_still(self, seconds: float) -> None:
        """Let everybody be due so much later."""
        for member in self.members.values():
            member.moments.put_off(seconds)
        self._agenda.put_off(seconds)

    @property
    def due(self) -> float | None:
        """When somebody may go on who stays, or None."""
        return self._agenda.earliest

    def holds(self, sequence: TokenSequence) -> bool:
        """Tell whether a sequence stays where it is."""
        return sequence in self._staying

    def holds_all(self, num_requests: int) -> bool:
        """Tell whether that is so for all of so many requests, none of which has lost its place meanwhile."""
        if not 0 < num_requests == len(self._staying):
            return False
        return all(sequence.status is Status.RUNNING for sequence in self._staying)

    # What happens; clients in `held` take no output meanwhile.

    def scheduled(self, step: Step, now: float, held: AbstractSet[int]) -> None:
        """Take note of a step that has just been scheduled."""
        for sequence in step.preempted:
            if sequence in self.members:
                self._let_go(sequence, held)
        for sequence in (*step.new, *step.resumed):
            if sequence in self.members and sequence.leaves_a_token:
                member = self.members[sequence]
                member.moments.begin(now, 0.0, member.outputs)
        for index, sequence in enumerate(step.sequences):
            if sequence in self.members:
                self._look_after(step, index, self.members[sequence].moments, now)

    def said(self, result: StepResult, ended_at: float, step_s: float, held: AbstractSet[int]) -> None:
        """Take note of what a step has brought; those go on as usual that have no moment of their own any more."""
        self._step_s = step_s
        for sequence in result.sequences:
            member = self.members.get(sequence)
            if member is None:
                continue
            member.outputs += 1
            moments = member.moments
            # Should it be preempted, its next output has a moment too.
            sequence.leaves_a_token = not moments.are_over
            if sequence.is_finished or sequence.status is Status.PAUSED or moments.are_over:
                self._let_go(sequence, held)
                self.forget(sequence)
                member.request.moments = None
            elif moments.due is None:
                moments.begin(ended_at - self._step_s, 0.0)
                self._let_go(sequence, held)
                if sequence.status is Status.RUNNING:
                    self._stay(sequence, moments.advance(self._step_s))

    def release(self, now: float, held: AbstractSet[int]) -> bool:
        """Let those go on whose moment has come; tell whether there are any."""
        released = self._agenda.take(now)
        for sequence in released:
            self._let_go(sequence, held)
        return bool(released)

    def _look_after(self, step: Step, index: int, moments: Moments, now: float) -> None:
        """Let a sequence of a step stay from now on until its moment, if that is still to come."""
        sequence, is_sampled = step.sequences[index], step.num_sampled[index] > 0
        if moments.due is None:
            if is_sampled:
                # When its next output is due follows from when this one is said.
                self._stay(sequence, None)
            return
        if moments.due > now and is_sampled:
            # The rest of a prompt that is computed in chunks.
            step.leave_a_token(index)
        elif is_sampled:
            moments.advance(self._step_s)
        is_complete = sequence.num_computed_tokens >= sequence.num_tokens - 1
        if moments.due > now and is_complete:
            self._stay(sequence, moments.due)

    def _stay(self, sequence: TokenSequence, until: float | None) -> None:
        """Let a sequence stay where it is until then; None is until it is let go."""
        sequence.is_blocked = True
        self._staying.add(sequence)
        if until is not None:
            self._agenda.put(sequence, until)

    def _let_go(self, sequence: TokenSequence, held: AbstractSet[int]) -> None:
        sequence.is_blocked = self.members[sequence].request.client in held
        self._staying.discard(sequence)
        self._agenda.forget(sequence)
