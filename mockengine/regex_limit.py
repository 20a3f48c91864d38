# SPDX-License-Identifier: Apache-2.0
"""A limit to what a search may take: some regexes take for ever on texts made for that, and texts are the clients'.

Python's `re` looks for signals while it searches, and a timer of the time that the process computes sends one. Signals
are handled in the main thread alone, which is where the engine runs; in any other there is no limit.
"""

import re
import signal
import threading
from types import FrameType
from typing import ClassVar, Final

LIMIT_S: Final = 0.1
"""Time that the process may compute for one search, in seconds."""


class RegexLimit:
    """Searches within that limit, if made in the main thread."""

    _is_searching: ClassVar[bool] = False

    def __init__(self) -> None:
        self._thread: int | None = None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGVTALRM, self._ring)
            self._thread = threading.get_ident()

    def search(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        """Search a text for a pattern.

        Raises:
            TimeoutError: it takes longer than `LIMIT_S`.

        """
        if threading.get_ident() != self._thread:
            return pattern.search(text)
        try:
            RegexLimit._is_searching = True
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
            try:
                return pattern.search(text)
            finally:
                # What rings from now on comes too late to matter.
                RegexLimit._is_searching = False
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except TimeoutError:
            took = f"a regex takes longer than {LIMIT_S:g} s to search this prompt"
            raise TimeoutError(f"{took} (mend the regex)") from None

    @classmethod
    def _ring(cls, _number: int, _frame: FrameType | None) -> None:
        if cls._is_searching:
            raise TimeoutError
