# SPDX-License-Identifier: Apache-2.0
"""A script that is read again when its file changes, so that the very next request is answered by what is there now.

Nobody watches the file: each request looks at it, which takes some microseconds. A file system tells the time of a
change in ticks of some milliseconds, so a file that has just changed may change again and look the same; until it is
older than that, it is read at every look, and what it holds decides. A new file with errors is refused as a whole, and
what was there before goes on.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from stat import S_ISREG
from typing import Final, Protocol, TypeAlias

from mockengine.replies.asked import Asked
from mockengine.replies.located import Problem
from mockengine.replies.rules import Rule, Script, Search, search_freely
from mockengine.replies.script_file import MOST_BYTES, ScriptError, ScriptFile
from mockengine.replies.wish import Wish

_Stamp: TypeAlias = tuple[int, ...] | str
"""What tells a file from what it was before, or why nothing can be told of it."""

# No file system's ticks are that long.
_SETTLES_NS: Final = 100_000_000


class ScriptListener(Protocol):
    """Hears of a script's file, once for each change."""

    def script_reloaded(self, file: str, rules: int) -> None:
        """Hear that the file has changed, and that its rules are in effect."""

    def script_refused(self, file: str, problems: Sequence[str]) -> None:
        """Hear why what the file is now cannot be used; what it was before stays in effect."""


class Scripted:
    """Wants what the script in a file says."""

    def __init__(
        self,
        file: ScriptFile,
        clock_ns: Callable[[], int],
        listener: ScriptListener | None = None,
        search: Search = search_freely,
    ) -> None:
        """Read the file.

        Args:
            file: where it is.
            clock_ns: tells the time that files are stamped with, in nanoseconds.
            listener: hears of its changes.
            search: looks for patterns in prompts.

        Raises:
            ScriptError: it cannot be used.

        """
        self._file = file
        self._clock_ns = clock_ns
        self._listener = listener
        self._search = search
        self._stamp: _Stamp = ()
        self._has_settled = False
        self._seen: bytes | str = ""
        rules = self._changed_rules()
        self._script = Script(rules or ())

    def wish_for(self, asked: Asked) -> Wish | None:
        """Return what the script wants of the reply to a request.

        Raises:
            ReplyError: that cannot be given, or takes too long to find.

        """
        self._look()
        return self._script.wish_for(asked, self._search)

    def _look(self) -> None:
        """Take what is in the file now, if it has changed and is in order."""
        path = str(self._file.path)
        try:
            rules = self._changed_rules()
        except ScriptError as error:
            if self._listener is not None:
                self._listener.script_refused(path, error.problems)
            return
        if rules is not None:
            self._script = Script(rules)
            if self._listener is not None:
                self._listener.script_reloaded(path, len(rules))

    def _changed_rules(self) -> Sequence[Rule] | None:
        """Return the rules of a file that is not what it was at the last look, or None.

        Raises:
            ScriptError: it has changed, and cannot be used.

        """
        stamp = self._stamp_now()
        if stamp == self._stamp and self._has_settled:
            return None
        self._stamp = stamp
        found = self._contents(stamp)
        seen = found if isinstance(found, str) else blake2b(found).digest()
        if seen == self._seen:
            return None
        self._seen = seen
        if isinstance(found, str):
            raise self._file.error([Problem(1, found)])
        return self._file.rules(found)

    def _stamp_now(self) -> _Stamp:
        try:
            now = self._file.path.stat()
        except OSError as error:
            self._has_settled = True
            return str(error.strerror)
        self._has_settled = abs(self._clock_ns() - now.st_ctime_ns) > _SETTLES_NS
        return (now.st_mode, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)

    def _contents(self, stamp: _Stamp) -> bytes | str:
        """Return what is in the file, or why that cannot be had."""
        if isinstance(stamp, str):
            return stamp
        if not S_ISREG(stamp[0]):
            return "it is no regular file"
        try:
            with self._file.path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError as error:
            return str(error.strerror)
        return data if len(data) <= MOST_BYTES else f"it has more than {MOST_BYTES} bytes"
