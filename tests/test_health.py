# SPDX-License-Identifier: Apache-2.0
"""`mockengine health`: what it says of whatever it finds at the admin port, and how little it takes."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from mockengine import health
from mockengine.cli import main
from mockengine.settings import Settings
from mockengine.testing.processes import free_port

HEAVY = (
    "pydantic",
    "pydantic_settings",
    "numpy",
    "zmq",
    "structlog",
    "fastapi",
    "uvicorn",
    "yaml",
    "argparse",
    "http.client",
    "ssl",
)


@contextmanager
def answering(answer: bytes | None, host: str = "127.0.0.1") -> Iterator[int]:
    """Listen for one client, and give it that answer; None accepts it and says nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        done = threading.Event()

        def answer_one() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(65_536)
                if answer is None:
                    done.wait(10)
                else:
                    client.sendall(answer)

        thread = threading.Thread(target=answer_one)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            # It may still wait for a client.
            with socket.socket(family) as last:
                last.settimeout(1)
                last.connect_ex((host, listener.getsockname()[1]))
            thread.join()


def http(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_an_engine_that_is_alive_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(http(200, '{"status":"ok","reason":null}')) as port:
        assert main(["health", f"--admin-port={port}"]) == 0
    assert capsys.readouterr() == ("ok\n", "")


def test_an_engine_that_fails_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(http(503, '{"status":"failing","reason":"the loop has not turned"}')) as port:
        assert main(["health", f"--admin-port={port}"]) == 1
    assert capsys.readouterr() == ("", "mockengine: failing: the loop has not turned\n")


def test_nobody_there_is_not_alive() -> None:
    port = free_port()
    alive, text = health.ask("127.0.0.1", port)
    assert not alive
    assert text == (
        f"the admin port at 127.0.0.1, port {port} does not answer: Connection refused "
        "(is the engine running, and does a variable or flag here name its admin_port?)"
    )


@pytest.mark.parametrize(
    "answer",
    [b"", b"\0\xff garbage\r\n\r\n", http(200, "no JSON"), http(200, "[]"), http(200, "{}"), http(200, '"ok"'),
     http(404, '{"detail":"Not Found"}'), b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"],
    ids=["nothing", "garbage", "text", "list", "no status", "string", "another server", "cut"],
)  # fmt: skip
def test_something_else_there_is_not_alive(answer: bytes) -> None:
    with answering(answer) as port:
        alive, text = health.ask("127.0.0.1", port)
    assert not alive
    assert "does something else listen there?" in text or "does not answer" in text


def test_silence_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_TIMEOUT_S", 0.05)
    with answering(None) as port:
        alive, text = health.ask("127.0.0.1", port)
    assert not alive
    assert text.endswith("did not answer within 0.05 s: the engine hangs")


@pytest.mark.parametrize(("told", "listening"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("::1", "::1")])  # noqa: S104
def test_the_address_that_the_engine_listens_at_can_be_asked(told: str, listening: str) -> None:
    with answering(http(200, '{"status":"ok"}'), listening) as port:
        assert health.ask(told, port) == (True, "ok")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"MOCKENGINE_ADMIN_PORT": "29555"}, ("127.0.0.1", 29555)),
        ({"MOCKENGINE_ADMIN_PORT": "1", "MOCKENGINE_ADMIN_HOST": "::1"}, ("::1", 1)),
        ({"MOCKENGINE_ADMIN_PORT": "65535", "MOCKENGINE_ADMIN_HOST": ""}, ("127.0.0.1", 65535)),
        ({"MOCKENGINE_ADMIN_PORT": "1", "MOCKENGINE_CONFIG": "x.yaml"}, None),
        ({"MOCKENGINE_ADMIN_PORT": "0"}, None),
        ({"MOCKENGINE_ADMIN_PORT": "65536"}, None),
        ({"MOCKENGINE_ADMIN_PORT": "²"}, None),
        ({}, None),
    ],
)
def test_plain_variables_are_read_without_the_settings(
    environ: Mapping[str, str], expected: tuple[str, int] | None
) -> None:
    assert health.address_from(environ) == expected


def test_the_default_host_is_that_of_the_settings() -> None:
    assert health.address_from({"MOCKENGINE_ADMIN_PORT": "1"}) == (Settings().admin_host, 1)


def test_the_configuration_file_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(http(200, '{"status":"ok"}')) as port:
        file = tmp_path / "settings.yaml"
        file.write_text(f"admin_port: {port}\n")
        monkeypatch.setenv("MOCKENGINE_CONFIG", str(file))
        assert main(["health"]) == 0


def test_a_port_that_is_off_cannot_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health"]) == 2
    assert capsys.readouterr().err == (
        "mockengine: admin_port is 0, so there is nobody to ask "
        "(give the engine's: MOCKENGINE_ADMIN_PORT or --admin-port)\n"
    )


def test_wrong_flags_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--admin-port=x"]) == 2
    assert "--admin-port" in capsys.readouterr().err


def test_it_imports_nothing_heavy() -> None:
    program = (
        "import sys; from mockengine.cli import main; code = main(['health']);"
        f"print(code, sorted(set({HEAVY}) & set(sys.modules)))"
    )
    environment = {"MOCKENGINE_ADMIN_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "1 []\n", done.stderr
