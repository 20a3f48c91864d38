# SPDX-License-Identifier: Apache-2.0
"""Which release line a frontend speaks, as far as it has shown."""

from collections.abc import Callable, Collection

from mockengine.wire.lines import ANY, LINES, Line, in_common, lines_of_add
from mockengine.wire.requests import EngineCoreRequest


class Dialect:
    """The line spoken towards one frontend, shared by all ranks that serve it.

    A setting decides it beforehand. Otherwise the first request that can be read does. A later one does not change
    it: a frontend does not change its version, and a broken message must not change how it is spoken to. A utility
    call that only a newer line makes settles what the request left open.
    """

    def __init__(
        self,
        line: Line | None = None,
        known: Collection[str] = (),
        on_learned: Callable[[tuple[str, ...]], None] = lambda _: None,
    ) -> None:
        """Begin with what is known.

        Args:
            line: the one that a setting names.
            known: without that, names of those that the frontend may be of, if it has shown before.
            on_learned: hears the names of those that it may be of, whenever they become fewer.

        """
        self._named = line
        candidates = tuple(each for each in LINES if each.name in known) if line is None else (line,)
        self._candidates: tuple[Line, ...] = candidates or LINES
        self._line = in_common(candidates) if candidates else ANY
        self._is_compared = False
        self._on_learned = on_learned

    @property
    def line(self) -> Line:
        """The line to speak: what all that are possible have in common."""
        return self._line

    def learn_from_request(self, request: EngineCoreRequest) -> str | None:
        """Take a request's layout as the frontend's own, if none is known yet.

        Returns:
            The releases whose layout the first request has, when that is not the one a setting names; else None.

        """
        if self._is_compared:
            return None
        self._is_compared = True
        seen = lines_of_add(request.items, request.sampling_keys, from_python=request.is_from_python)
        if self._named is None:
            # A call may have told more already.
            self._settle(tuple(line for line in self._candidates if line in seen) or self._candidates)
            return None
        # The newest serves every Python frontend of that length, but is not what each of them is.
        is_possible = self._named in seen or (request.is_from_python and self._named.add_items == seen[-1].add_items)
        return None if is_possible else in_common(seen).name

    def learn_from_call(self, method: str) -> None:
        """Take a call that only one line makes as a sign of that line, where several are possible."""
        callers = tuple(line for line in self._candidates if line.own_method == method)
        if callers:
            self._settle(callers)

    def _settle(self, candidates: tuple[Line, ...]) -> None:
        self._candidates = candidates
        self._line = in_common(candidates)
        self._on_learned(tuple(line.name for line in candidates))
