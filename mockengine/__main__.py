# SPDX-License-Identifier: Apache-2.0
"""The way into the program, for `mockengine` and `python -m mockengine` alike.

It makes the process answer to signals and only then imports the rest, which takes a while: until it answers, SIGTERM
ends it like a crash or, in a container, where it is process 1, not at all.
"""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command line and return the exit code of the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    # NumPy would start a thread for each core, for linear algebra that nothing here does; that takes 80 ms and more.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from mockengine import cli  # noqa: PLC0415 - see above

    return cli.main()


def _end(number: int, _frame: FrameType | None) -> None:
    """End the process at once; an engine that runs has handlers of its own."""
    # The engine is there to be stopped. Any other command has not done what it was started for.
    is_engine = not sys.argv[1:] or sys.argv[1] == "serve" or sys.argv[1].startswith("-")
    os._exit(0 if is_engine and number == signal.SIGTERM else 128 + number)


if __name__ == "__main__":
    sys.exit(main())
