# SPDX-License-Identifier: Apache-2.0
"""Ends engines and real frontends in every way and writes down who notices what: `make failure-modes`.

The tables of docs/failure-modes.md are written by this, and the tests run it again and compare.
"""

import http.client
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx

from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import rust_frontend
from mockengine.testing.frontends import SERVED_MODEL_NAME, Frontend, PythonFrontend, RustFrontend
from mockengine.testing.processes import free_port
from tests.support.python_frontend import VLLM_VERSION, python_frontend
from tests.support.stack import MODEL, ROOT, wait_until

PAGE: Final = ROOT / "docs" / "failure-modes.md"
RUST_VERSIONS: Final = ("0.33.0", "0.30.0", "0.27.1", "0.24.0")
FRONTENDS: Final = (*(f"Rust {version}" for version in RUST_VERSIONS), f"Python {VLLM_VERSION}")
# What has not happened within this time counts as never; what happens takes a fraction of it.
PATIENCE_S: Final = 3.0
# What comes first decides, and either may.
_RUST, _PYTHON = FRONTENDS[:-1], FRONTENDS[-1]
_ENDS_OF_PYTHON: Final = (
    "error 500: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "hangs",
)
_EITHER: Final = {
    ("engine-sigterm", _PYTHON, "request in flight"): ("`finish_reason` `abort`", "the connection breaks off"),
    ("frontend-sigterm", _PYTHON, "request in flight"): _ENDS_OF_PYTHON,
    **{("engine-killed", name, "new request"): ("500", "hangs") for name in _RUST},
    **{("engine-killed-replaced", name, "new request"): ("500", "hangs") for name in _RUST},
}
# It tidies up before it exits.
_PYTHON_PATIENCE_S: Final = 20.0

Row = dict[str, str]
"""What was seen, by column."""


class Client:
    """A client that has asked for a streamed reply."""

    def __init__(self, frontend: Frontend) -> None:
        self._end = "the connection breaks off"
        self._connection = http.client.HTTPConnection("127.0.0.1", frontend.http_port)
        self._connection.connect()
        # The connection forgets it when the response has begun or ended.
        self._socket: socket.socket = self._connection.sock
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def sees(self) -> str:
        """Return how the reply ends, in words."""
        self._thread.join(PATIENCE_S)
        return "hangs" if self._thread.is_alive() else self._end

    def give_up(self) -> None:
        """Wait no longer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _read(self) -> None:
        body = {"model": SERVED_MODEL_NAME, "prompt": "Hello", "max_tokens": 10_000, "stream": True}
        # What was seen last is how it ended.
        with suppress(OSError, http.client.HTTPException):
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
            for line in self._connection.getresponse():
                self._note(line.decode().strip())

    def _note(self, line: str) -> None:
        event = json.loads(line.removeprefix("data: ")) if line.endswith("}") else {}
        error = event.get("error")
        if error is not None:
            self._end = f"error {error.get('code', '')}: {error['message']}"
        for choice in event.get("choices", ()):
            if choice.get("finish_reason"):
                self._end = f"`finish_reason` `{choice['finish_reason']}`"


def what_a_new_request_gets(url: str) -> str:
    """Send a short request and return what comes back, in words."""
    body = {"model": SERVED_MODEL_NAME, "prompt": "Hello", "max_tokens": 1}
    return _answer(lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False))


def what_health_says(url: str) -> str:
    """Ask for `/health` and return the status, in words."""
    return _answer(lambda: httpx.get(f"{url}/health", timeout=PATIENCE_S, trust_env=False))


def _answer(ask: Callable[[], httpx.Response]) -> str:
    try:
        return str(ask().status_code)
    except httpx.TimeoutException:
        return "hangs"
    except httpx.HTTPError:
        return "refused"


def what_became_of(frontend: Frontend) -> str:
    """Return whether the frontend's process goes on, in words."""
    try:
        patience_s = _PYTHON_PATIENCE_S if isinstance(frontend, PythonFrontend) else PATIENCE_S
        return f"exits with {frontend.wait(patience_s)}"
    except TimeoutError:
        return "goes on"


@dataclass
class Stage:
    """A frontend, an engine that serves it, and a client that reads."""

    make_frontend: Callable[[int], Frontend]
    frontend: Frontend
    engine: EngineProcess
    state_file: Path
    client: Client = field(init=False)

    def start_engine(self, *flags: str) -> EngineProcess:
        """Start another engine for this frontend's address."""
        return EngineProcess(f"--handshake-address={self.frontend.handshake_address}", *flags)


def _engine_columns(stage: Stage) -> Row:
    """Look at a frontend whose engine has ended."""
    with ThreadPoolExecutor() as pool:
        in_flight = pool.submit(stage.client.sees)
        process = what_became_of(stage.frontend)
    # In this order: a frontend that notices only when it is spoken to has been spoken to before it is asked.
    new = what_a_new_request_gets(stage.frontend.url)
    health = what_health_says(stage.frontend.url)
    return {
        "frontend's process": process,
        "request in flight": in_flight.result(),
        "new request": new,
        "`/health`": health,
    }


def _engine_told_to_stop(stage: Stage) -> Row:
    stage.engine.send_signal(signal.SIGTERM)
    stage.engine.send_signal(signal.SIGCONT)
    assert stage.engine.wait() == 0
    return _engine_columns(stage)


def _engine_killed(stage: Stage) -> Row:
    stage.engine.kill()
    return _engine_columns(stage)


def _engine_killed_and_replaced(stage: Stage) -> Row:
    stage.engine.kill()
    with stage.start_engine() as successor:
        successor.wait_for("engine joining")
        row = _engine_columns(stage)
        assert not successor.logged("engine ready")
        return row


def _engine_killed_and_succeeded(stage: Stage) -> Row:
    # What an engine has not even read, nobody can know of.
    stage.engine.send_signal(signal.SIGCONT)
    stage.engine.wait_for("request started", lambda entry: entry["max_tokens"] > 1)
    stage.engine.kill()
    with stage.start_engine(f"--state-file={stage.state_file}") as successor:
        successor.wait_until(
            lambda: bool(successor.logged("engine resumed") or successor.logged("abandoned frontend told")),
            "what becomes of the frontend",
            _PYTHON_PATIENCE_S,
        )
        return _engine_columns(stage)


def _frontend_columns(stage: Stage) -> Row:
    """Look at an engine whose frontend has ended, and at the next frontend."""
    stage.engine.send_signal(signal.SIGCONT)
    in_flight = stage.client.sees()
    lost = stage.engine.wait_for("frontend lost")
    with stage.make_frontend(stage.frontend.handshake_port) as successor:
        successor.wait_healthy(besides=stage.engine)
        new = what_a_new_request_gets(successor.url)
    return {
        "request in flight": in_flight,
        "what the engine logs": f"`frontend lost`: {lost['reason']}",
        "request to the next frontend": new,
    }


def _frontend_told_to_stop(stage: Stage) -> Row:
    stage.frontend.process.send_signal(signal.SIGTERM)
    in_flight = stage.client.sees()
    # A frontend may wait for its clients.
    stage.client.give_up()
    code = stage.frontend.wait(60)
    return {"exit code": str(code), **_frontend_columns(stage), "request in flight": in_flight}


def _frontend_killed(stage: Stage) -> Row:
    stage.frontend.kill()
    return _frontend_columns(stage)


@dataclass(frozen=True)
class Mode:
    """One way to fail.

    Attributes:
        title: heading of its table.
        text: what to know about it.
        act: makes it happen and tells what was seen.

    """

    title: str
    text: str
    act: Callable[[Stage], Row]


MODES: Final = {
    "engine-sigterm": Mode(
        "The engine gets SIGTERM",
        "It ends every request and says `ENGINE_CORE_DEAD`, unless `leave_notice` is `none`. An error that it does not "
        "survive is told in the same way.",
        _engine_told_to_stop,
    ),
    "engine-killed": Mode(
        "The engine is killed",
        "By SIGKILL, as the out-of-memory killer does: nobody says anything.",
        _engine_killed,
    ),
    "engine-killed-replaced": Mode(
        "The engine is killed and starts again, without `state_file`",
        "The new engine waits at the handshake address, where this frontend does not listen any more.",
        _engine_killed_and_replaced,
    ),
    "engine-killed-succeeded": Mode(
        "The engine is killed and starts again, with `state_file`",
        "The new engine finds in the file whom the old one served. A Rust frontend takes it in the old one's place; a "
        "Python frontend does not, and is told `ENGINE_CORE_DEAD`. With `resume: false` both are. Here the engine had "
        "begun with the request: one that it had not read hangs.",
        _engine_killed_and_succeeded,
    ),
    "frontend-sigterm": Mode(
        "The frontend gets SIGTERM",
        "The engine loses its connections, drops what runs after `rejoin_grace_s`, and joins the next frontend. A Rust "
        "frontend lets what runs finish if it is started with `--shutdown-timeout` and a number of seconds. A Python "
        "frontend may wait until its clients have given up.",
        _frontend_told_to_stop,
    ),
    "frontend-killed": Mode("The frontend is killed", "The same, for the engine.", _frontend_killed),
}


@contextmanager
def staged(make_frontend: Callable[[int], Frontend]) -> Iterator[Stage]:
    """Set up a frontend, an engine that serves it, and a client whose request has just reached the engine.

    The engine is stopped: ended in the middle of a message, it would make some frontends fail of that.
    """
    with TemporaryDirectory() as folder, make_frontend(free_port()) as frontend:
        state_file = Path(folder) / "state.json"
        # At a pace, for a mode in which the engine does go on.
        flags = (f"--handshake-address={frontend.handshake_address}", f"--state-file={state_file}", "--itl-ms=20")
        with EngineProcess(*flags) as engine:
            frontend.wait_healthy(besides=engine)
            # Health is no proof that the way to the engine is open, and a stopped engine opens none.
            wait_until(lambda: what_a_new_request_gets(frontend.url), "200".__eq__, "what a first request gets")
            stage = Stage(make_frontend, frontend, engine, state_file)
            engine.send_signal(signal.SIGSTOP)
            stage.client = Client(frontend)
            try:
                wait_until(lambda: _unread_bytes(engine.process.pid), bool, "what the engine has not read")
                yield stage
            finally:
                engine.send_signal(signal.SIGCONT)
                stage.client.give_up()


def _unread_bytes(pid: int) -> int:
    """Return how many bytes wait in the kernel for that process to read, on all its TCP connections."""
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    connections = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(int(fields[4].split(":")[1], 16) for fields in connections if fields[9] in inodes)


def observed(mode: str, frontend: str) -> Row:
    """Let that frontend, named as in the tables, fail in that way, and return what was seen."""
    with staged(_factory(frontend)) as stage:
        row = MODES[mode].act(stage)
    for column, seen in row.items():
        possible = _EITHER.get((mode, frontend, column), ())
        if seen in possible:
            row[column] = " or ".join(possible)
    return row


def _factory(name: str) -> Callable[[int], Frontend]:
    kind, version = name.split()
    if kind == "Rust":
        executable = rust_frontend(version)
        return lambda port: RustFrontend(executable, MODEL, handshake_port=port)
    python = python_frontend(report=print)
    return lambda port: PythonFrontend(python, MODEL, handshake_port=port)


# The page.


def documented(mode: str, frontend: str) -> Row:
    """Return what the page says about that frontend failing in that way."""
    lines = _between_markers(PAGE.read_text(encoding="utf-8"), mode)[1].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"]
    for row in rows:
        if row[0] == frontend:
            return dict(zip(header[1:], row[1:], strict=True))
    raise AssertionError(f"{PAGE.name} says nothing about {frontend} under {mode}: run `make failure-modes`")


def with_table(page: str, mode: str, rows: dict[str, Row]) -> str:
    """Return the page with a new table for one way to fail; `rows` is by frontend."""
    before, _, after = _between_markers(page, mode)
    columns = list(next(iter(rows.values())))
    table = [f"| frontend | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    table += [f"| {name} | {' | '.join(row[column] for column in columns)} |" for name, row in rows.items()]
    parts = (f"## {MODES[mode].title}", MODES[mode].text, "\n".join(table))
    return before + "\n" + "\n\n".join(parts) + "\n" + after


def _between_markers(page: str, mode: str) -> tuple[str, str, str]:
    begin, end = f"<!-- begin: {mode}, written by `make failure-modes` -->", "<!-- end -->"
    before, found, rest = page.partition(begin)
    content, closed, after = rest.partition(end)
    assert found, f"{PAGE.name} has no line {begin}"
    assert closed, f"{PAGE.name} has no line {end} after {begin}"
    return before + begin, content, end + after


def main(argv: Sequence[str]) -> int:
    """Write the tables anew, or those that `argv` names."""
    for mode in argv or MODES:
        rows: dict[str, Row] = {}
        for name in FRONTENDS:
            rows[name] = observed(mode, name)
            print(f"{mode}, {name}: {rows[name]}", flush=True)  # noqa: T201 - it takes minutes; a person may watch
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), mode, rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
