# SPDX-License-Identifier: Apache-2.0
"""Kills a process group when the process that started it dies without stopping it.

A guard is a small process that waits for the end of a pipe from its parent. The operating system closes that pipe when
the parent ends, however it ends; so this works after a SIGKILL too, for a whole group, and whichever thread of the
parent started it, none of which is true of an exit handler or of the parent-death signal that Linux offers.

The file runs as a script as well, and imports nothing of ours, so that a guard is there within milliseconds.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final

_DISMISSAL: Final = b"dismissed"


class Guard:
    """A guard over one process group, from its making until it is dismissed."""

    def __init__(self, group: int) -> None:
        """Start guarding the process group of that id."""
        self._process = subprocess.Popen(  # noqa: S603 - this very file
            [sys.executable, "-I", "-S", __file__, str(group)], stdin=subprocess.PIPE, start_new_session=True
        )

    def dismiss(self) -> None:
        """End the guard and leave the group alone. May be called again."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.communicate(_DISMISSAL)


def _watch(group: int) -> None:
    """Wait for the end of stdin, then kill the group unless the parent dismissed this guard before."""
    if sys.stdin.buffer.read() != _DISMISSAL:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
