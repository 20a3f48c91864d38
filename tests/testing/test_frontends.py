# SPDX-License-Identifier: Apache-2.0
"""Frontends as child processes, with a tiny HTTP server standing in for the real ones."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mockengine.testing.frontends import Frontend, PythonFrontend, RustFrontend
from mockengine.testing.guard import Guard

DEADLINE_S = 10.0

# Called like a frontend: says how it was called, serves /health with the status that HEALTH names, and has a child.
STAND_IN = textwrap.dedent("""\
    import json, os, subprocess, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(int(os.environ.get("HEALTH", "200")))
            self.end_headers()

    print(json.dumps([sys.argv[1:], dict(os.environ)]), flush=True)
    if "EXIT" in os.environ:
        print("cannot serve", flush=True)
        sys.exit(int(os.environ["EXIT"]))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Health).serve_forever()
""")


class StandIn(Frontend):
    def __init__(self, env: Mapping[str, str] | None = None, *, prelude: str = "") -> None:
        super().__init__(
            [sys.executable, "-c", prelude + STAND_IN],
            Path("model"),
            handshake_port=None,
            http_port=None,
            data_parallel_size=2,
            extra_args=["--more"],
            env=env or {},
        )

    @property
    def child(self) -> int:
        """The process that the stand-in started."""
        self.wait_until(lambda: any(line.startswith("child ") for line in self.lines), "child")
        (line,) = (line for line in self.lines if line.startswith("child "))
        return int(line.split()[1])


def is_running(pid: int) -> bool:
    """Whether the process runs; one that has ended but that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.02)


def script(path: Path) -> Path:
    """Return a program that prints its arguments, one a line, and then chosen variables."""
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "print(*sys.argv[1:], sep='\\n')\n"
        "for name in ('HF_HUB_OFFLINE', 'PYTHONPATH', 'MOCKENGINE_PORT', 'ADDED'):\n"
        "    print(f'{name}={os.environ.get(name)}')\n"
    )
    path.chmod(0o755)
    return path


def lines_of(frontend: Frontend) -> list[str]:
    with frontend:
        frontend.wait()
        return frontend.lines


def test_the_rust_frontend_is_called_as_documented(tmp_path: Path) -> None:
    program = script(tmp_path / "vllm-rs")
    frontend = RustFrontend(program, tmp_path, handshake_port=1, http_port=2, extra_args=["--flag", "value"])
    assert lines_of(frontend)[:20] == [
        *("serve", str(tmp_path)),
        *("--served-model-name", "tiny"),
        *("--data-parallel-size", "1"),
        *("--data-parallel-size-local", "0"),
        *("--data-parallel-address", "127.0.0.1"),
        *("--data-parallel-rpc-port", "1"),
        *("--host", "127.0.0.1"),
        *("--port", "2"),
        *("--flag", "value"),
        *("HF_HUB_OFFLINE=1", "PYTHONPATH=None"),
    ]


@pytest.mark.parametrize(("count", "arguments"), [(None, ["--more"]), (3, ["--api-server-count", "3", "--more"])])
def test_the_python_frontend_is_called_as_documented(tmp_path: Path, count: int | None, arguments: list[str]) -> None:
    program = script(tmp_path / "python")
    frontend = PythonFrontend(
        program,
        tmp_path,
        handshake_port=1,
        http_port=2,
        data_parallel_size=4,
        api_server_count=count,
        extra_args=["--more"],
    )
    lines = lines_of(frontend)
    assert lines[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path)]
    assert lines[lines.index("--data-parallel-size") + 1] == "4"
    assert lines[lines.index("--port") + 2 : lines.index("HF_HUB_OFFLINE=1")] == arguments


@pytest.mark.parametrize(
    ("kind", "python_path"), [(RustFrontend, "PYTHONPATH=/elsewhere"), (PythonFrontend, "PYTHONPATH=")]
)
def test_only_what_is_meant_for_a_frontend_is_in_its_environment(
    kind: type[RustFrontend | PythonFrontend], python_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOCKENGINE_PORT", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    lines = lines_of(kind(script(tmp_path / "program"), tmp_path, env={"ADDED": "yes"}))
    assert lines[-4:] == ["HF_HUB_OFFLINE=1", python_path, "MOCKENGINE_PORT=None", "ADDED=yes"]


def test_ports_that_are_not_given_are_free_and_differ() -> None:
    with StandIn() as frontend:
        assert frontend.handshake_port != frontend.http_port
        assert frontend.url == f"http://127.0.0.1:{frontend.http_port}"
        assert frontend.handshake_address == f"tcp://127.0.0.1:{frontend.handshake_port}"


def test_waiting_ends_when_it_is_healthy() -> None:
    with StandIn() as frontend:
        frontend.wait_healthy()
        assert frontend.is_healthy


def test_a_proxy_in_the_environment_is_not_asked_for_the_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with StandIn() as frontend:
        frontend.wait_healthy()


def test_waiting_for_what_never_becomes_healthy_ends_at_the_deadline() -> None:
    with StandIn({"HEALTH": "503"}) as frontend:
        reason = rf"no 200 from {frontend.url}/health \(have all engines joined {frontend.handshake_address}\?\)"
        with pytest.raises(TimeoutError, match=reason):
            frontend.wait_healthy(0.5)
        assert not frontend.is_healthy


def test_waiting_for_what_has_ended_fails_at_once_with_its_last_words() -> None:
    began = time.monotonic()
    with StandIn({"EXIT": "7"}) as frontend, pytest.raises(TimeoutError, match="ended with 7") as failure:
        frontend.wait_healthy(60)
    assert "cannot serve" in str(failure.value)
    assert time.monotonic() - began < 30


def test_stop_ends_what_the_frontend_started_too() -> None:
    with StandIn() as frontend:
        child = frontend.child
        assert frontend.stop() == -signal.SIGTERM
        wait_until(lambda: not is_running(child))
        assert frontend.has_ended


def test_what_ignores_sigterm_is_killed_after_the_deadline() -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with StandIn(prelude=deaf) as frontend:
        child = frontend.child
        assert frontend.stop(deadline_s=0.2) == -signal.SIGKILL
        wait_until(lambda: not is_running(child))


def test_stop_may_be_called_again() -> None:
    with StandIn() as frontend:
        assert frontend.stop() == frontend.stop()


def test_a_frontend_and_its_children_end_when_their_starter_is_killed() -> None:
    starter = textwrap.dedent(f"""\
        import time
        from {__name__} import StandIn
        frontend = StandIn()
        print(frontend.process.pid, frontend.child, flush=True)
        time.sleep(600)
    """)
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, env=environment, cwd=root
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
        process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in pids))


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def test_a_dismissed_guard_leaves_its_group_alone() -> None:
    with sleeper() as process:
        guard = Guard(process.pid)
        guard.dismiss()
        guard.dismiss()
        assert process.poll() is None
        process.kill()


def test_a_guard_whose_pipe_ends_kills_its_group() -> None:
    with sleeper() as process:
        guard = Guard(process.pid)
        assert guard._process.stdin is not None
        guard._process.stdin.close()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
        assert guard._process.wait(DEADLINE_S) == 0


def test_a_guard_of_a_group_that_is_gone_ends_in_peace() -> None:
    with sleeper() as process:
        process.kill()
    guard = Guard(process.pid)
    assert guard._process.stdin is not None
    guard._process.stdin.close()
    assert guard._process.wait(DEADLINE_S) == 0
