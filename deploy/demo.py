# SPDX-License-Identifier: Apache-2.0
"""The demo: a real vLLM frontend and the engine beside it, one chat completion through both, then yours to play with.

`make demo` runs it. Without a terminal, or with DEMO_ONCE=1, it ends after the reply; its exit code says whether
everything worked.
"""

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

from mockengine import smoke
from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, FetchError, rust_frontend
from mockengine.testing.frontends import SERVED_MODEL_NAME, RustFrontend

MODEL = Path(__file__).parent / "model"
HTTP_PORT = 8000
CURL = """\
curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'"""


def main() -> int:
    """Run the demo and return its exit code."""
    goes_on = sys.stdout.isatty() and os.environ.get("DEMO_ONCE", "") in {"", "0"}
    try:
        executable = rust_frontend(DEFAULT_VERSION)
        return _show(executable, goes_on=goes_on)
    except (FetchError, TimeoutError, OSError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


def _show(executable: Path, *, goes_on: bool) -> int:
    print(f"Starting vLLM's Rust frontend {DEFAULT_VERSION} on deploy/model, with no engine of its own ...")
    # A fixed port reads better in a command to copy; a free one serves when something already listens there.
    port = HTTP_PORT if goes_on and _is_free(HTTP_PORT) else None
    with RustFrontend(executable, MODEL, http_port=port) as frontend:
        print(f"Starting mockengine, which joins it at {frontend.handshake_address} ...")
        flags = (f"--handshake-address={frontend.handshake_address}", f"--vllm-version={DEFAULT_VERSION}")
        with EngineProcess(*flags) as engine:
            frontend.wait_healthy(besides=engine)
            command = Path(sys.executable).with_name("mockengine")
            shown = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else command
            print(f"Both are up: {frontend.url}\n\n{shown} smoke --url {frontend.url}")
            code = smoke.main(["--url", frontend.url])
            if code != 0:
                print(f"\nThe frontend wrote:\n{frontend.tail}\n\nThe engine wrote:\n{engine.tail}", file=sys.stderr)
                return code
            engine.wait_for("request finished")
            print("\nWhat the engine logged:")
            print("\n".join(line for line in engine.lines if '"request ' in line))
            if goes_on:
                curl = CURL.format(port=frontend.http_port, model=SERVED_MODEL_NAME)
                print(f"\nYour turn (Ctrl-C stops both):\n\n{curl}")
                _wait_for_interrupt()
                print("\nStopping both ...")
    print("Done.")
    return 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _wait_for_interrupt() -> None:
    interrupted = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    interrupted.wait()


if __name__ == "__main__":
    sys.exit(main())
