# SPDX-License-Identifier: Apache-2.0
"""Child processes that tests, demos and benchmarks start: heard while they run, gone when they are done with."""

import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mockengine.testing.guard import Guard

DEADLINE_S: Final = 10.0
"""How long every wait lasts at most, unless told otherwise."""

_LINES_SHOWN: Final = 30
_FIRST_PORT: Final = 10_000
_PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOOK_AGAIN_S: Final = 0.02


def free_port() -> int:
    """Return a TCP port of the loopback interface that nothing uses now.

    It is none of those that the system gives to whoever asks for any: a program that takes ten seconds to start would
    find it given to somebody else's connection.
    """
    while True:
        port = random.SystemRandom().randrange(_FIRST_PORT, _first_ephemeral_port())
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _first_ephemeral_port() -> int:
    try:
        return int(_PORT_RANGE.read_text().split()[0])
    except OSError:
        # The range that IANA reserves for this begins here.
        return 49_152


class ChildProcess:
    """A process that runs while the context lasts, in a process group of its own.

    The group keeps a Ctrl-C meant for the parent from the child, and takes the child's own children along: all are gone
    when the context ends, when `stop` or `kill` returns, and when this process dies. Whatever it writes is kept.

    Attributes:
        process: the child.

    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start the process.

        Args:
            command: program and arguments.
            environment: variables to set besides the parent's, of which `MOCKENGINE_*` are not passed on.

        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOCKENGINE_")}
        self.process = subprocess.Popen(  # noqa: S603 - starting what the caller names is what this is for
            list(command),
            env={**inherited, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._guard = Guard(self.process.pid)
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"output of {command[0]}", daemon=True)
        self._reader.start()

    @property
    def lines(self) -> list[str]:
        """Every line it has written so far."""
        with self._lock:
            return list(self._lines)

    @property
    def output(self) -> str:
        """Everything it has written so far."""
        return "\n".join(self.lines)

    @property
    def tail(self) -> str:
        """The last lines it has written, for an error message."""
        return "\n".join(self.lines[-_LINES_SHOWN:]) or "(nothing)"

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the condition holds.

        Raises:
            TimeoutError: it does not in time, or the process has ended without; the text shows what it wrote.

        """
        end = time.monotonic() + deadline_s
        while True:
            # Asked before the condition, so that the last words of a process count.
            ended = self.has_ended and not self._reader.is_alive()
            if condition():
                return
            if ended:
                raise TimeoutError(
                    f"no {what}: the process ended with {self.process.returncode} and wrote:\n{self.tail}"
                )
            if time.monotonic() >= end:
                raise TimeoutError(f"no {what} within {deadline_s:g} s; the process wrote:\n{self.tail}")
            time.sleep(_LOOK_AGAIN_S)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait until it has ended and return its exit code, negative for a signal.

        Raises:
            TimeoutError: it has not; the text shows what it wrote.

        """
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"no end within {deadline_s:g} s; the process wrote:\n{self.tail}") from error
        self._reader.join(deadline_s)
        return code

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        """Ask it to end with SIGTERM, kill what is left of it then or after the deadline, and return its exit code."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(deadline_s)
        # Before its output is waited for: that ends with the last process that could still write.
        self.kill()
        return self.wait(deadline_s)

    def kill(self) -> None:
        """End it and every process of its group on the spot."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._guard.dismiss()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._lock:
                self._lines.append(line.rstrip("\n"))
