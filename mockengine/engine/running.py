# SPDX-License-Identifier: Apache-2.0
"""The running set: requests of one client that have nothing to say but tokens and their scores.

All of them step together, so what a step costs is a handful of array operations, whatever their number. A request
joins when its first output has been said and leaves before its last one, since those two say more. Both cost the same
however many others there are.

Requests whose outputs take the same number of bytes share a lane.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from mockengine.engine.lanes import Lane, ScoredLane, make_lane
from mockengine.engine.requests import Request
from mockengine.replies.scores import ScoreForm
from mockengine.wire.batch import Rows
from mockengine.wire.codec import pack
from mockengine.wire.record import record

# A lane that has emptied is kept for the next request of that kind, unless it is one of many or has grown large, or
# has scores, beside which a new one costs nothing.
_KEPT_LANES: Final = 16
_KEPT_ROWS: Final = 1_024


@record
class _Member:
    """A request of the set: where it is, since when, and when it leaves, counted in steps of the set."""

    lane: Lane
    joined_at: int
    leaves_at: int


class RunningSet:
    """Requests of one client that say a full chunk of tokens with every step, perhaps with scores, and no more."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._lanes: dict[tuple[int, ScoreForm | None], Lane] = {}
        self._members: dict[str, _Member] = {}
        self._leaving: dict[int, dict[str, None]] = {}
        self._steps = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def join(self, request: Request) -> None:
        """Take in a request that has at least one full chunk to say before its last output."""
        packed_id = pack(request.request_id)
        form = None if request.scores is None else request.scores.form
        lane = self._lanes.get((len(packed_id), form))
        if lane is None:
            lane = self._lanes[len(packed_id), form] = make_lane(len(packed_id), self._chunk_size, form)
        lane.join(request, packed_id)
        leaves_at = self._steps + request.plain_outputs_left(self._chunk_size)
        self._members[request.request_id] = _Member(lane, self._steps, leaves_at)
        self._leaving.setdefault(leaves_at, {})[request.request_id] = None
        request.is_in_running_set = True

    def leave(self, request_id: str) -> Request:
        """Give a request back, with the tokens counted that it has said here."""
        member = self._members.pop(request_id)
        leaving = self._leaving[member.leaves_at]
        del leaving[request_id]
        if not leaving:
            del self._leaving[member.leaves_at]
        request = member.lane.leave(request_id)
        request.is_in_running_set = False
        request.skip((self._steps - member.joined_at) * self._chunk_size)
        if not member.lane.requests:
            self._forget_if_dear(member.lane)
        return request

    def in_flight(self) -> Iterator[tuple[Request, int]]:
        """Yield every request and the tokens that it has said, here and before."""
        for lane in self._lanes.values():
            for request in lane.requests:
                joined_at = self._members[request.request_id].joined_at
                yield request, request.output_tokens + (self._steps - joined_at) * self._chunk_size

    def _forget_if_dear(self, emptied: Lane) -> None:
        is_dear = len(self._lanes) > _KEPT_LANES or emptied.capacity > _KEPT_ROWS or isinstance(emptied, ScoredLane)
        if is_dear:
            del self._lanes[next(kind for kind, lane in self._lanes.items() if lane is emptied)]

    @property
    def num_bytes(self) -> int:
        """What a step takes."""
        return sum(lane.num_bytes for lane in self._lanes.values())

    def most_steps(self, most: int) -> int:
        """Return how many steps, at most so many, can be made at once before anybody leaves."""
        most = min([most, *[lane.most_steps for lane in self._lanes.values() if lane.requests]])
        if len(self._leaving) < most:
            return min(most, min(self._leaving, default=most + self._steps) - self._steps)
        return next((ahead for ahead in range(1, most) if self._steps + ahead in self._leaving), most)

    def step(self, steps: int = 1) -> list[Rows]:
        """Let every request say its next chunk, as often as that, at most `most_steps`.

        Returns:
            The rows of all, valid until the next change.

        """
        self._steps += steps
        return [lane.step(steps) for lane in self._lanes.values() if lane.requests]

    def take_all(self) -> list[Request]:
        """Remove and return every request."""
        return [self.leave(request_id) for request_id in list(self._members)]

    def take_others(self, request_ids: AbstractSet[str]) -> list[Request]:
        """Remove and return the requests that are not among these."""
        return [self.leave(request_id) for request_id in list(self._members) if request_id not in request_ids]

    def take_leavers(self) -> Sequence[Request]:
        """Remove and return the requests whose next output is their last."""
        return [self.leave(request_id) for request_id in list(self._leaving.get(self._steps, ()))]
