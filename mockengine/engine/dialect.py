# SPDX-License-Identifier: Apache-2.0
"""Which release line a frontend speaks, as far as it has shown."""

from mockengine.wire.lines import NEWEST, Line, line_of_add
from mockengine.wire.requests import EngineCoreRequest


class Dialect:
    """The line spoken towards one frontend, shared by all ranks that serve it.

    A setting decides it beforehand. Otherwise the first request that can be read does, and nothing after it: a
    frontend does not change its version, and a broken message must not change how it is spoken to.
    """

    def __init__(self, line: Line | None = None) -> None:
        self._line = line

    @property
    def line(self) -> Line:
        """The line to speak: the newest until the frontend has shown its own."""
        return self._line or NEWEST

    def learn(self, request: EngineCoreRequest) -> None:
        """Take a request's layout as the frontend's own, if none is known yet."""
        if self._line is None:
            self._line = line_of_add(request.items)
