# SPDX-License-Identifier: Apache-2.0
"""The admin port over HTTP, in front of a whole engine or of a view that the test makes."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mockengine.admin import port as admin_port
from mockengine.admin.port import AdminPort, AdminPortError
from mockengine.admin.view import View
from mockengine.engine_setup import set_up
from mockengine.journal import Journal
from mockengine.remote import Journalled, Remote
from mockengine.replies.random import RandomTokens
from mockengine.service import StartError
from mockengine.settings import Settings
from mockengine.status import Counts, RankStatus, State, Status
from mockengine.testing.double import FrontendDouble
from mockengine.testing.processes import free_port
from mockengine.transport.desk import Desk
from tests.support.engine_thread import EngineThread
from tests.support.stack import ROOT, wait_until

# Longer than any test: a request of that length is still running when the test looks.
ENDLESS = 20_000_000
ROOM: dict[str, Any] = {"max_model_len": 2 * ENDLESS, "num_gpu_blocks": 2 * ENDLESS // 16}
NAMES = {
    *("build_info", "ready", "joins_total", "frontends_lost_total", "log_lines_dropped_total"),
    "faults_total",
    *("requests_running", "requests_waiting", "requests_finished_total", "requests_refused_total"),
    *("prompt_tokens_total", "output_tokens_total", "messages_dropped_total"),
    *("step_lateness_seconds_bucket", "step_lateness_seconds_count", "step_lateness_seconds_sum"),
    *("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"),
}


@dataclass
class Admin:
    """The admin port of an engine, as a client sees it."""

    port: int
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=20, trust_env=False))

    def get(self, path: str) -> httpx.Response:
        return self.client.get(f"http://127.0.0.1:{self.port}{path}")

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return every sample, by name without prefix and label values."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return {
            (sample.name.removeprefix("mockengine_"), tuple(sample.labels.values())): sample.value for sample in samples
        }

    def sample(self, name: str, *labels: str) -> float:
        return self.samples()[name, labels]

    def readiness(self) -> tuple[int, dict[str, Any]]:
        response = self.get("/ready")
        return response.status_code, response.json()

    def wait_until_it_is(self, word: str) -> None:
        wait_until(lambda: self.readiness()[1]["status"], lambda status: status == word, "status")


@contextmanager
def watched(frontend: FrontendDouble, **settings: Any) -> Iterator[tuple[EngineThread, Admin]]:
    """Start an engine with an admin port, whose streams last."""
    port = free_port()
    with EngineThread(frontend, **{"admin_port": port, "itl_ms": 1, **ROOM, **settings}) as engine:
        admin = Admin(port)
        with admin.client:
            yield engine, admin


def test_an_engine_without_a_frontend_is_healthy_and_not_ready() -> None:
    with FrontendDouble(ranks=2) as frontend, watched(frontend) as (_, admin):
        assert (admin.get("/health").status_code, admin.get("/health").json()) == (200, {"status": "ok"})
        code, body = admin.readiness()
        assert code == 503
        idle = {"state": "joining", "running": 0, "waiting": 0}
        assert body == {
            "status": "joining",
            "clients": 0,
            "connected_clients": 0,
            "ranks": [{"engine": 0, **idle}, {"engine": 1, **idle}],
        }
        assert admin.sample("ready") == 0


def test_a_joined_engine_is_ready_until_its_frontend_goes_away() -> None:
    with FrontendDouble(ranks=2, clients=2) as frontend, watched(frontend, rejoin_grace_s=60) as (_, admin):
        frontend.handshake()
        admin.wait_until_it_is("ready")
        frontend.add("a", max_tokens=ENDLESS, rank=1)
        frontend.listen()
        code, body = admin.readiness()
        assert (code, body["clients"], body["connected_clients"]) == (200, 2, 2)
        assert (admin.get("/health/ready").status_code, admin.get("/health/ready").json()) == (code, body)
        assert body["ranks"] == [
            {"engine": 0, "state": "serving", "running": 0, "waiting": 0},
            {"engine": 1, "state": "serving", "running": 1, "waiting": 0},
        ]
        assert admin.get("/health").status_code == 200
        assert (admin.sample("ready"), admin.sample("requests_running", "1")) == (1, 1)
        frontend.close()
        admin.wait_until_it_is("disconnected")
        assert admin.readiness()[0] == 503
        assert admin.get("/health").status_code == 200


def test_an_engine_that_drains_is_leaving_and_not_ready() -> None:
    with FrontendDouble() as frontend, watched(frontend, shutdown_timeout_s=60) as (engine, admin):
        frontend.handshake()
        frontend.add("a", max_tokens=ENDLESS)
        frontend.listen()
        engine.ask_to_stop()
        admin.wait_until_it_is("leaving")
        assert admin.readiness()[0] == 503
        assert admin.get("/health").status_code == 200
        frontend.abort("a")
        engine.wait()
        assert engine.exit_code == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "admin"]


def test_an_idle_engine_wakes_up_to_show_that_it_is_alive() -> None:
    with FrontendDouble() as frontend, watched(frontend) as (_, admin):
        frontend.handshake()
        admin.wait_until_it_is("ready")
        assert [admin.get("/health").status_code for _ in range(20)] == [200] * 20


def test_an_engine_that_waits_for_a_frontend_sleeps_again_after_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    turned = Journal.turned

    def note(journal: Journal, now: float) -> None:
        turns.append(now)
        turned(journal, now)

    monkeypatch.setattr(Journal, "turned", note)
    with FrontendDouble() as frontend, watched(frontend) as (_, admin):
        assert admin.get("/health").status_code == 200
        seen = len(turns)
        # As long as it takes to see that nothing goes on.
        time.sleep(0.2)
        assert len(turns) <= seen + 2


def test_an_engine_that_hangs_is_failing_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    tokens = RandomTokens.tokens

    def hang(*arguments: Any) -> list[int]:
        assert goes_on.wait(30)
        return tokens(*arguments)

    monkeypatch.setattr(RandomTokens, "tokens", hang)
    with FrontendDouble() as frontend, watched(frontend) as (_, admin):
        frontend.handshake()
        admin.wait_until_it_is("ready")
        frontend.add("a", max_tokens=1)
        try:
            response = wait_until(lambda: admin.get("/health"), lambda seen: seen.status_code == 503, "health")
        finally:
            goes_on.set()
        assert response.json()["status"] == "failing"
        assert response.json()["reason"].startswith("the engine's loop has not turned for ")
        frontend.reply("a")
        assert admin.get("/health").json() == {"status": "ok"}


def test_metrics_count_what_happened() -> None:
    with FrontendDouble() as frontend, watched(frontend) as (engine, admin):
        frontend.handshake()
        frontend.add("a", prompt=[1, 2, 3], max_tokens=5)
        frontend.reply("a")
        frontend.add("b", prompt=[1, 2], max_tokens=ENDLESS)
        frontend.listen()
        frontend.abort("b")
        frontend.add("c", prompt=[])
        frontend.reply("c")
        frontend.send([b"\0", b"\xc1"])
        engine.wait_for("message dropped")
        seen = admin.samples()
        aborted = engine.wait_for("request finished", lambda entry: entry["request_id"] == "b")["output_tokens"]
        assert seen["joins_total", ()] == 1
        assert seen["requests_finished_total", ("length",)] == 1
        assert seen["requests_finished_total", ("abort",)] == 1
        assert seen["requests_finished_total", ("stop",)] == 0
        assert seen["requests_refused_total", ()] == 1
        assert seen["prompt_tokens_total", ()] == 5
        assert seen["output_tokens_total", ()] == 5 + aborted
        assert seen["messages_dropped_total", ("not_msgpack",)] == 1
        assert seen["messages_dropped_total", ("framing",)] == 0
        assert seen["requests_running", ("0",)] == seen["requests_waiting", ("0",)] == 0
        assert seen["buffered_bytes", ("0",)] == 0
        assert seen["step_lateness_seconds_count", ()] == seen["step_lateness_seconds_bucket", ("+Inf",)] >= 5


def test_metrics_survive_a_change_of_frontend() -> None:
    with FrontendDouble() as frontend, watched(frontend) as (engine, admin):
        frontend.handshake()
        frontend.add("a", max_tokens=5)
        frontend.reply("a")
        address = frontend.handshake_address
        frontend.close()
        engine.wait_for("frontend lost")
        with FrontendDouble(handshake_address=address) as successor:
            successor.handshake()
            successor.add("a", max_tokens=2)
            successor.reply("a")
            seen = admin.samples()
        assert (seen["joins_total", ()], seen["frontends_lost_total", ()]) == (2, 1)
        assert seen["output_tokens_total", ()] == 7


def test_metrics_have_names_of_our_own_and_say_what_they_are() -> None:
    with FrontendDouble() as frontend, watched(frontend) as (_, admin):
        frontend.handshake()
        admin.wait_until_it_is("ready")
        text = admin.get("/metrics").text
        families = list(text_string_to_metric_families(text))
        assert all(family.name.startswith("mockengine_") and family.documentation for family in families)
        names = {sample.name.removeprefix("mockengine_") for family in families for sample in family.samples}
        assert names >= NAMES | {"buffered_bytes"}
        assert "vllm" not in text


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "admin.md").read_text()
    with FrontendDouble() as frontend, watched(frontend) as (_, admin):
        families = list(text_string_to_metric_families(admin.get("/metrics").text))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    own = {name for name in names if not name.startswith("mockengine_process_")}
    assert set(re.findall(r"^\| `(mockengine_\w+)` \|", page, re.MULTILINE)) == own


def test_metrics_are_told_in_the_format_that_is_asked_for() -> None:
    with FrontendDouble() as frontend, watched(frontend) as (_, admin):
        url = f"http://127.0.0.1:{admin.port}/metrics"
        open_metrics = admin.client.get(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
        assert open_metrics.text.endswith("# EOF\n")
        assert admin.get("/metrics").headers["content-type"].startswith("text/plain")


def test_a_reader_that_stops_shows_as_buffered_bytes() -> None:
    with FrontendDouble(reads_ahead=False) as frontend, watched(frontend, itl_ms=0) as (_, admin):
        frontend.handshake()
        frontend.add("x" * 60_000, max_tokens=ENDLESS)
        frontend.listen()
        wait_until(lambda: admin.sample("buffered_bytes", "0"), lambda size: size > 60_000, "buffered bytes")
        frontend.abort("x" * 60_000)
        while admin.sample("buffered_bytes", "0"):
            frontend.listen()
        wait_until(lambda: admin.sample("buffered_bytes", "0"), lambda size: size == 0, "buffered bytes")


def test_wrong_paths_and_methods_are_explained() -> None:
    with FrontendDouble() as frontend, watched(frontend) as (_, admin):
        response = admin.get("/healthz")
        assert response.status_code == 404
        assert response.json() == {"detail": "there is no /healthz here (use /health, /health/ready, /metrics, /ready)"}
        url = f"http://127.0.0.1:{admin.port}/health"
        assert admin.client.post(url).status_code == 405
        assert admin.client.head(url).status_code == 200


def test_what_is_not_http_disturbs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with FrontendDouble() as frontend, watched(frontend) as (engine, admin):
        for garbage in (b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /health HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", admin.port), timeout=10) as client:
                client.sendall(garbage)
                client.recv(1_000)
        with socket.create_connection(("127.0.0.1", admin.port)):
            assert admin.get("/health").status_code == 200
        frontend.handshake()
        engine.wait_for("engine ready")
        assert not engine.logged("admin request failed")
    assert capfd.readouterr() == ("", "")


def test_connections_that_ask_for_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mockengine.admin.server._PATIENCE_S", 0.2)
    with FrontendDouble() as frontend, watched(frontend) as (_, admin):
        assert admin.get("/health").status_code == 200
        for sent in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection(("127.0.0.1", admin.port), timeout=10) as client:
                client.sendall(sent)
                assert client.recv(1_000) == b""


def test_connections_beyond_what_probes_need_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mockengine.admin.server._MOST_CONNECTIONS", 5)
    with FrontendDouble() as frontend, watched(frontend) as (_, admin), ExitStack() as connections:
        admin.get("/health")
        # The client above keeps a connection of its own.
        for _ in range(4):
            connections.enter_context(socket.create_connection(("127.0.0.1", admin.port), timeout=10))
        with socket.create_connection(("127.0.0.1", admin.port), timeout=10) as one_more:
            assert one_more.recv(1_000) == b""
        assert admin.get("/health").status_code == 200


# Starting, and what keeps it from starting.


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AdminPortError, match=f"cannot listen at 127.0.0.1, port {port}: Address already in use"):
            AdminPort("127.0.0.1", port)


def test_a_host_that_is_not_of_this_machine_is_named() -> None:
    with pytest.raises(AdminPortError, match=r"at 192\.0\.2\.1, port 1234: Cannot assign requested address"):
        AdminPort("192.0.2.1", 1234)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_port, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(AdminPortError, match=r"admin_port is 5, .* missing: uvicorn .*pip install '\.\[admin\]'"):
        AdminPort("127.0.0.1", 5)


def test_an_engine_whose_admin_port_cannot_be_had_does_not_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, FrontendDouble() as frontend:
        engine = EngineThread(frontend, admin_port=taken.getsockname()[1])
        with engine:
            engine.wait()
        assert isinstance(engine.error, StartError)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_listens_where_it_is_told(host: str) -> None:
    port = free_port()
    view = _view(lambda: Status(State.JOINING, float("inf"), (RankStatus(0),)))
    admin = AdminPort(host, port)
    admin.start(view, _remote(), _never, _never)
    try:
        url = f"http://[{host}]:{port}/health" if ":" in host else f"http://{host}:{port}/health"
        assert httpx.get(url, trust_env=False, timeout=20).json() == {"status": "ok"}
    finally:
        admin.close()


def test_what_it_needs_is_not_loaded_before_the_engine_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_port, "_HEAD_START_S", 60)
    port = free_port()
    admin = AdminPort("127.0.0.1", port)
    admin.start(_view(lambda: Status(State.LEAVING, 0.0, ())), _remote(), _never, _never)
    try:
        # The socket takes connections, and nobody answers them yet.
        with socket.create_connection(("127.0.0.1", port), timeout=0.3) as client:
            client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            with pytest.raises(TimeoutError):
                client.recv(1)
            admin.begin()
            client.settimeout(20)
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        admin.close()


def test_a_process_that_leaves_need_not_turn() -> None:
    port = free_port()
    admin = AdminPort("127.0.0.1", port)
    admin.start(_view(lambda: Status(State.LEAVING, 0.0, ())), _remote(), _never, _never)
    try:
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=20).status_code == 200
    finally:
        admin.close()


def test_it_can_be_closed_before_it_began() -> None:
    admin = AdminPort("127.0.0.1", free_port())
    admin.start(_view(lambda: pytest.fail("nobody asks")), _remote(), _never, _never)
    admin.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "admin"]


# Defects.


def test_a_defect_in_an_answer_is_logged_and_costs_that_answer() -> None:
    complaints: list[tuple[str, BaseException | None]] = []

    def broken() -> Status:
        raise ZeroDivisionError

    port = free_port()
    admin = AdminPort("127.0.0.1", port)
    admin.start(_view(broken), _remote(), lambda reason, error: complaints.append((reason, error)), _never)
    try:
        for _ in range(2):
            assert httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False, timeout=20).status_code == 500
    finally:
        admin.close()
    assert [type(error) for _, error in complaints] == [ZeroDivisionError] * 2


def test_a_thread_that_ends_takes_the_engine_along(monkeypatch: pytest.MonkeyPatch) -> None:
    from mockengine.admin.server import Server  # noqa: PLC0415 - brings uvicorn, which only this test needs here

    def fail(_server: Server, _listener: socket.socket) -> None:
        raise OSError("out of descriptors")

    monkeypatch.setattr(Server, "serve_on", fail)
    with FrontendDouble() as frontend, EngineThread(frontend, admin_port=free_port()) as engine:
        frontend.handshake()
        engine.wait()
        assert engine.exit_code == 1
        assert engine.wait_for("engine failed")["reason"] == "OSError: out of descriptors"
        frontend.wait_for_death()


def _view(status: Any) -> View:
    return View("0", status, Counts(), lambda: 0, lambda: (), lambda: None)


def _remote() -> Remote:
    """Return what changes an engine that nobody has started."""
    return Remote(set_up(Settings()), Desk(_never), cast("Journalled", None), _never)


def _never(*_: object) -> None:
    pytest.fail("nothing went wrong")
