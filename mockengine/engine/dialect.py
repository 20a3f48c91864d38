# SPDX-License-Identifier: Apache-2.0
"""Which release line a frontend speaks, as far as it has shown."""

from mockengine.wire.lines import NEWEST, Line, in_common, lines_of_add
from mockengine.wire.requests import EngineCoreRequest


class Dialect:
    """The line spoken towards one frontend, shared by all ranks that serve it.

    A setting decides it beforehand. Otherwise the first request that can be read does. A later one does not change
    it: a frontend does not change its version, and a broken message must not change how it is spoken to. A utility
    call that only a newer line makes settles what the request left open.
    """

    def __init__(self, line: Line | None = None) -> None:
        self._candidates: tuple[Line, ...] = () if line is None else (line,)
        self._line = NEWEST if line is None else line

    @property
    def line(self) -> Line:
        """The line to speak: what all that are possible have in common; the newest while nothing is known."""
        return self._line

    def learn_from_request(self, request: EngineCoreRequest) -> None:
        """Take a request's layout as the frontend's own, if none is known yet."""
        if not self._candidates:
            self._candidates = lines_of_add(request.items, request.sampling_keys, from_python=request.is_from_python)
            self._line = in_common(self._candidates)

    def learn_from_call(self, method: str) -> None:
        """Take a call as a sign of the newer line, where the first request left several open."""
        callers = [line for line in self._candidates if line.own_method == method]
        if callers:
            self._candidates = (callers[0],)
            self._line = callers[0]
