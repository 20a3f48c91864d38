# SPDX-License-Identifier: Apache-2.0
"""`mockengine smoke` against a stand-in frontend that behaves well, and badly in every way that was thought of."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, TCPServer
from typing import Any

import pytest

from mockengine.cli import main
from mockengine.smoke import Report, SmokeError, smoke

_MODELS = json.dumps({"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}).encode()


def _event(finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"delta": delta, "finish_reason": finish_reason}]}


def _usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def _stream(*events: object, done: bool = True) -> bytes:
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {line}\n\n" for line in [*data, *["[DONE]"] * done]).encode()


_GOOD = _stream(
    _event(role="assistant", content=""),
    _event(content="Hel"),
    _event(content="lo"),
    _event("length", content="!"),
    _usage(3),
)


@dataclass
class _Frontend:
    """A stand-in for a frontend: what it answers, and what it was asked."""

    models: bytes = _MODELS
    models_status: int = 200
    reply: bytes = _GOOD
    reply_status: int = 200
    reply_type: str = "text/event-stream; charset=utf-8"
    # Whether the stream ends as HTTP wants it.
    complete: bool = True
    # Called when all of the reply but its end has gone out.
    hold: Callable[[], object] = bool
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""


@contextmanager
def _running(frontend: _Frontend) -> Iterator[_Frontend]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(frontend.models_status, "application/json", frontend.models)
            self.wfile.write(b"0\r\n\r\n")

        def do_POST(self) -> None:
            self._answer(frontend.reply_status, frontend.reply_type, frontend.reply)
            frontend.hold()
            self.wfile.write(b"0\r\n\r\n" if frontend.complete else b"")
            self.close_connection = True

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            frontend.keys.append(self.headers.get("Authorization"))
            frontend.asked.append((self.command, self.path, json.loads(asked) if asked else None))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))

        def log_message(self, *_args: object) -> None:
            pass

    with _listening(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        frontend.url = url
        yield frontend


@contextmanager
def _listening(server: TCPServer) -> Iterator[str]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _failure(frontend: _Frontend, **arguments: Any) -> str:
    with _running(frontend), pytest.raises(SmokeError) as caught:
        smoke(frontend.url, **arguments)
    return str(caught.value).replace(frontend.url, "URL")


def test_a_reply_is_summed_up() -> None:
    with _running(_Frontend()) as frontend:
        report = smoke(frontend.url)

    assert report == Report(
        model="tiny",
        text="Hello!",
        chunks=4,
        tokens=3,
        finish_reason="length",
        time_to_first_token_s=report.time_to_first_token_s,
        tokens_per_second=report.tokens_per_second,
    )
    assert 0 < report.time_to_first_token_s <= 3 / report.tokens_per_second


def test_the_request_is_that_of_vllms_docs() -> None:
    with _running(_Frontend()) as frontend:
        smoke(frontend.url)

    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert frontend.asked == [("GET", "/v1/models", None), ("POST", "/v1/chat/completions", body)]


def test_a_named_model_is_asked_without_listing_the_models() -> None:
    with _running(_Frontend()) as frontend:
        report = smoke(frontend.url, "mine", prompt="Sing.", max_tokens=4)

    [(method, _, body)] = frontend.asked
    assert (method, report.model, body["model"], body["max_tokens"]) == ("POST", "mine", "mine", 4)
    assert body["messages"] == [{"role": "user", "content": "Sing."}]


def test_a_key_is_sent_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with _running(_Frontend()) as frontend:
        assert main(["smoke", "--url", frontend.url, "--api-key", "from-flag"]) == 0
        monkeypatch.setenv("VLLM_API_KEY", "from-variable")
        assert main(["smoke", "--url", frontend.url]) == 0
        assert main(["smoke", "--url", frontend.url, "--api-key", "from-flag"]) == 0
        monkeypatch.delenv("VLLM_API_KEY")
        assert main(["smoke", "--url", frontend.url]) == 0
    assert frontend.keys == [
        *["Bearer from-flag"] * 2,
        *["Bearer from-variable"] * 2,
        *["Bearer from-flag"] * 2,
        *[None] * 2,
    ]


@pytest.mark.parametrize("path", ["/base", "/base/", "/base/v1", "/base/v1/"])
def test_the_url_may_have_a_path_with_or_without_v1(path: str) -> None:
    with _running(_Frontend()) as frontend:
        smoke(frontend.url + path)

    assert [path for _, path, _ in frontend.asked] == ["/base/v1/models", "/base/v1/chat/completions"]


@pytest.mark.parametrize("key", ["content", "reasoning", "reasoning_content"])
def test_text_of_any_kind_counts(key: str) -> None:
    stream = _stream(_event(role="assistant"), _event(**{key: "a"}), _event(finish_reason="stop"), _usage(2))
    with _running(_Frontend(reply=b": a comment\r\nevent: message\r\n" + stream)) as frontend:
        report = smoke(frontend.url)

    assert (report.text, report.chunks, report.finish_reason) == ("a", 3, "stop")


def test_a_reply_without_text_is_a_reply() -> None:
    with _running(_Frontend(reply=_stream(_event("stop", content=""), _usage(1)))) as frontend:
        report = smoke(frontend.url)

    assert (report.text, report.chunks, report.tokens) == ("", 1, 1)
    assert report.time_to_first_token_s > 0


@pytest.mark.parametrize(
    ("frontend", "reason"),
    [
        (
            _Frontend(models=b'{"data": []}'),
            """GET /v1/models lists no model: {"data": []}""",
        ),
        (
            _Frontend(models=b"<html>"),
            "GET /v1/models lists no model: <html>",
        ),
        (
            _Frontend(models=b'{"detail": "Not Found"}', models_status=404),
            "GET /v1/models was answered with 404 Not Found: Not Found",
        ),
        (
            _Frontend(models=b"\xff" * 300, models_status=503),
            "GET /v1/models was answered with 503 Service Unavailable: " + "\ufffd" * 200 + "…",
        ),
        (
            _Frontend(reply=b'{"error": {"message": "max_tokens is too large", "code": 400}}', reply_status=400),
            "POST /v1/chat/completions was answered with 400 Bad Request: max_tokens is too large",
        ),
        (
            _Frontend(reply=b'{"object": "error", "message": "EngineDeadError"}', reply_status=500),
            "POST /v1/chat/completions was answered with 500 Internal Server Error: EngineDeadError",
        ),
        (
            _Frontend(reply=b'{"error": "Unauthorized"}', reply_status=401),
            (
                "POST /v1/chat/completions was answered with 401 Unauthorized: Unauthorized "
                "(the frontend wants a key: name it by --api-key or VLLM_API_KEY)"
            ),
        ),
        (
            _Frontend(reply=b'{"id": 1}', reply_type="application/json"),
            """the reply is application/json, not text/event-stream: {"id": 1}""",
        ),
        (
            _Frontend(reply=_stream(_event(content="a"), {"error": {"message": "engine is\ndead"}})),
            r"the frontend broke the reply off: 'engine is\ndead'",
        ),
        (
            _Frontend(reply=_stream({"object": "error", "message": "engine is dead"})),
            "the frontend broke the reply off: engine is dead",
        ),
        (
            _Frontend(reply=_stream(_event("length", content="a"), _usage(1), done=False)),
            "the stream ended without [DONE]",
        ),
        (
            _Frontend(reply=_stream("{")),
            "a chunk is not JSON: {",
        ),
        (
            _Frontend(reply=_stream([1])),
            "this is no chunk of a chat completion: [1]",
        ),
        (
            _Frontend(reply=_stream({"choices": [{}]})),
            """this is no chunk of a chat completion: {"choices": [{}]}""",
        ),
        (
            _Frontend(reply=_stream({"choices": [], "usage": {"completion_tokens": "many"}})),
            """this is no chunk of a chat completion: {"choices": [], "usage": {"completion_tokens": "many"}}""",
        ),
        (
            _Frontend(reply=_stream()),
            "the stream ended properly, but had no choices in it",
        ),
        (
            _Frontend(reply=_stream(_event(content="a"), _usage(1))),
            "the stream ended properly, but had no finish reason in it",
        ),
        (
            _Frontend(reply=_stream(_event("length", content="a"))),
            "the stream ended properly, but had no count of tokens in it",
        ),
        (
            _Frontend(reply=_stream(_event(content="a"), _event("abort", content=""), _usage(1))),
            "the engine gave the reply up after 1 tokens: abort",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(frontend: _Frontend, reason: str) -> None:
    assert _failure(frontend) == reason


def test_a_connection_that_breaks_is_said() -> None:
    reason = _failure(_Frontend(reply=_stream(_event(content="a"), done=False), complete=False), model="tiny")

    assert reason == "the stream ended without [DONE]"


def test_something_that_does_not_speak_http_is_said() -> None:
    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")

    with _listening(TCPServer(("127.0.0.1", 0), Handler)) as url, pytest.raises(SmokeError) as caught:
        smoke(url)

    assert str(caught.value).startswith(f"{url} broke off or does not speak HTTP: BadStatusLine ")
    assert str(caught.value).endswith(", while waiting for the answer to GET /v1/models")


def test_a_frontend_that_never_finishes_is_given_up() -> None:
    released = threading.Event()
    frontend = _Frontend(reply=_stream(_event(content="a"), done=False), hold=lambda: released.wait(60))
    with _running(frontend):
        try:
            with pytest.raises(SmokeError) as caught:
                smoke(frontend.url, timeout_s=1.0)
        finally:
            released.set()

    assert str(caught.value) == (
        f"no complete reply from {frontend.url} within 1 s, after chunk 1 "
        "(has an engine joined the frontend? a longer wait is set by --timeout-s)"
    )


def test_nobody_listening_is_said() -> None:
    with _running(_Frontend()) as frontend:
        url = frontend.url

    with pytest.raises(SmokeError) as caught:
        smoke(url)

    assert str(caught.value) == (
        f"{url}: Connection refused, while connecting "
        "(is this the frontend's address, and have its engines joined? It listens only then)"
    )


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://a", "http://", "http://a:b", "http://[::1"])
def test_a_url_that_cannot_be_asked_is_said(url: str) -> None:
    with pytest.raises(SmokeError) as caught:
        smoke(url)

    assert str(caught.value) == f"{url} is not a URL that can be asked (use http://HOST:PORT or https://HOST:PORT)"


@pytest.mark.parametrize("url", ["http://a b:80", "http://.:80", "http://" + "a" * 64 + ".:80"])
def test_a_host_name_that_makes_no_sense_is_said(url: str) -> None:
    with pytest.raises(SmokeError, match=r"^http://"):
        smoke(url)


# The command.


def test_the_command_prints_what_came_back(capsys: pytest.CaptureFixture[str]) -> None:
    with _running(_Frontend()) as frontend:
        code = main(["smoke", "--url", frontend.url])

    output = capsys.readouterr()
    rows = [line.split("  ", 1) for line in output.out.splitlines()]
    assert (code, output.err) == (0, "")
    assert [[name, value.strip()] for name, value in rows[:5]] == [
        ["model", "tiny"],
        ["text", "'Hello!'"],
        ["chunks", "4"],
        ["tokens", "3"],
        ["finish reason", "length"],
    ]
    assert [name for name, _ in rows[5:]] == ["time to first token", "tokens per second"]


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    with _running(_Frontend()) as frontend:
        code = main(["smoke", "--url", frontend.url, "--json", "--max-tokens=3", "--model=m", "--prompt=p"])

    [line] = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert code == 0
    assert report.pop("ok") is True
    assert Report(**report).text == "Hello!"


def test_the_command_exits_with_1_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with _running(_Frontend(reply=_stream())) as frontend:
        codes = [main(["smoke", "--url", frontend.url, *json_flag]) for json_flag in ([], ["--json"])]

    reason = "the stream ended properly, but had no choices in it"
    assert codes == [1, 1]
    assert capsys.readouterr() == (
        json.dumps({"ok": False, "error": reason}) + "\n",
        f"mockengine smoke: {reason}\n",
    )


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "the following arguments are required: --url"),
        (["--url=http://a", "--max-tokens=0"], "argument --max-tokens: 0 is not allowed (use a whole number from 1 to"),
        (["--url=http://a", "--timeout-s=nan"], "argument --timeout-s: nan is not allowed (use a number above 0 and"),
        (["--url=http://a", "--timeout-s=x"], "argument --timeout-s: x is not allowed (use a number above 0 and"),
        (["--url=http://a", "--max-tok=1"], "unrecognized arguments: --max-tok=1"),
    ],
)
def test_a_wrong_flag_exits_with_2(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke", *argv]) == 2
    assert f"mockengine smoke: error: {error}" in capsys.readouterr().err


def test_help_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke", "--help"]) == 0
    assert "usage: mockengine smoke" in capsys.readouterr().out
