# SPDX-License-Identifier: Apache-2.0
"""`mockengine smoke`: one streamed chat completion against a running vLLM frontend, and what came back.

This module knows the little of the OpenAI API that the request needs. It must not know the engine: any frontend will
do, with whatever engine behind it.
"""

import argparse
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import quote, urlsplit

_MAX_TIMEOUT_S: Final = 86_400
_SHOWN_CHARACTERS: Final = 200
# The one that vLLM itself reads.
_KEY_VARIABLE: Final = "VLLM_API_KEY"


class SmokeError(Exception):
    """The frontend did not serve the request; the text tells a person why."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came back.

    `tokens` is the frontend's own count. Times start when the request is sent; `tokens_per_second` is over the whole
    reply, up to the end of the stream.
    """

    model: str
    text: str
    chunks: int
    tokens: int
    finish_reason: str
    time_to_first_token_s: float
    tokens_per_second: float


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 and what came back, 1 and why it did not, or 2 for a wrong flag."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as finished:  # argparse has answered --help or named the wrong flag
        return int(finished.code or 0)
    try:
        report = smoke(
            args.url,
            args.model,
            prompt=args.prompt,
            max_tokens=args.max_tokens,
            timeout_s=args.timeout_s,
            api_key=args.api_key or os.environ.get(_KEY_VARIABLE),
        )
    except SmokeError as error:
        if args.json:
            sys.stdout.write(json.dumps({"ok": False, "error": str(error)}) + "\n")
        else:
            sys.stderr.write(f"mockengine smoke: {error}\n")
        return 1
    sys.stdout.write(json.dumps({"ok": True} | asdict(report)) + "\n" if args.json else _for_person(report))
    return 0


def smoke(
    url: str,
    model: str | None = None,
    *,
    prompt: str = "Say hello.",
    max_tokens: int = 16,
    timeout_s: float = 30.0,
    api_key: str | None = None,
) -> Report:
    """Ask the frontend at `url` for a chat completion and return what came back, within `timeout_s` in all.

    Without `model` the first one that the frontend lists is asked. `api_key` is for one that wants a key. Raises
    `SmokeError` when anything is not as it should be.
    """
    probe = _Probe(url, timeout_s, api_key)
    outcome: Future[Report] = Future()

    def work() -> None:
        try:
            outcome.set_result(probe.ask(model, prompt, max_tokens))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            outcome.set_exception(error)

    # Sockets time out call by call; a frontend that sends one byte now and then would keep us for ever. A daemon thread
    # can be left behind.
    threading.Thread(target=work, name="smoke", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except TimeoutError:
        raise probe.too_late() from None


class _Probe:
    """One run against one frontend; `stage` says in words how far it is."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None) -> None:
        self.stage = "while connecting"
        self._url = url
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, model: str | None, prompt: str, max_tokens: int) -> Report:
        """Send the requests and judge the replies; raises `SmokeError`."""
        try:
            return self._ask(model or self._first_model(), prompt, max_tokens)
        except (HTTPException, UnicodeError) as error:
            raise SmokeError(
                f"{self._url} broke off or does not speak HTTP: {type(error).__name__} {error}, {self.stage}"
            ) from error
        except TimeoutError as error:
            # The socket's own limit is the same, and may be noticed a moment before that of the whole.
            raise self.too_late() from error
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise SmokeError(
                f"{self._url}: {reason}, {self.stage} "
                "(is this the frontend's address, and have its engines joined? It listens only then)"
            ) from error

    def too_late(self) -> SmokeError:
        """Return what to say of a frontend that took too long."""
        return SmokeError(
            f"no complete reply from {self._url} within {self._timeout_s:g} s, {self.stage} "
            "(has an engine joined the frontend? a longer wait is set by --timeout-s)"
        )

    def _first_model(self) -> str:
        with closing(self._connection()) as connection, self._request(connection, "GET", "/v1/models") as response:
            body = response.read()
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise SmokeError(f"GET /v1/models lists no model: {_shown(body)}") from None

    def _ask(self, model: str, prompt: str, max_tokens: int) -> Report:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        route = "/v1/chat/completions"
        reply = _Reply(time.monotonic())
        with closing(self._connection()) as connection, self._request(connection, "POST", route, body) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise SmokeError(f"the reply is {kind}, not text/event-stream: {_shown(response.read())}")
            self.stage = "while waiting for the first chunk"
            for chunk in _chunks(response):
                reply.add(chunk, time.monotonic())
                self.stage = f"after chunk {reply.chunks}"
            return reply.report(model, time.monotonic())

    def _connection(self) -> HTTPConnection:
        try:
            parts = urlsplit(self._url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https"):
            raise SmokeError(f"{self._url} is not a URL that can be asked (use http://HOST:PORT or https://HOST:PORT)")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(host, port, timeout=self._timeout_s)

    def _request(
        self, connection: HTTPConnection, method: str, route: str, body: dict[str, Any] | None = None
    ) -> HTTPResponse:
        # OpenAI clients want the base URL with /v1, so people copy it with it.
        base = urlsplit(self._url).path.rstrip("/").removesuffix("/v1")
        data = None if body is None else json.dumps(body)
        self.stage = "while connecting"
        connection.connect()
        self.stage = f"while waiting for the answer to {method} {route}"
        connection.request(method, quote(base, safe="/%") + route, data, self._headers)
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            with response:
                reason = _shown(_message(response.read()))
            advice = ""
            if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                advice = f" (the frontend wants a key: name it by --api-key or {_KEY_VARIABLE})"
            raise SmokeError(
                f"{method} {route} was answered with {response.status} {response.reason}: {reason}{advice}"
            )
        return response


class _Reply:
    """Adds up the chunks of one reply."""

    def __init__(self, sent_at: float) -> None:
        self.chunks = 0
        self._sent_at = sent_at
        self._first_chunk_at = self._first_text_at = math.inf
        self._text = ""
        self._tokens = 0
        self._finish_reason = ""

    def add(self, chunk: Any, now: float) -> None:
        """Take in one chunk that came at `now`; raises `SmokeError` for one that reports an error or makes no sense."""
        try:
            if "error" in chunk or chunk.get("object") == "error":
                raise SmokeError(f"the frontend broke the reply off: {_shown(_message(json.dumps(chunk)))}")
            self._tokens = int((chunk.get("usage") or {}).get("completion_tokens", self._tokens))
            for choice in chunk["choices"]:
                self._add_choice(choice, now)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise SmokeError(f"this is no chunk of a chat completion: {_shown(json.dumps(chunk))}") from None

    def _add_choice(self, choice: Any, now: float) -> None:
        self.chunks += 1
        self._first_chunk_at = min(self._first_chunk_at, now)
        text = "".join(choice["delta"].get(key) or "" for key in ("reasoning", "reasoning_content", "content"))
        if text:
            self._first_text_at = min(self._first_text_at, now)
        self._text += text
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def report(self, model: str, now: float) -> Report:
        """Return what came back in a stream that ended at `now`; raises `SmokeError` if that is no reply."""
        for name, value in (
            ("choices", self.chunks),
            ("finish reason", self._finish_reason),
            ("count of tokens", self._tokens),
        ):
            if not value:
                raise SmokeError(f"the stream ended properly, but had no {name} in it")
        if self._finish_reason in ("abort", "error"):
            raise SmokeError(f"the engine gave the reply up after {self._tokens} tokens: {self._finish_reason}")
        # The first chunk names the role and may come long before there is any text.
        first_at = self._first_chunk_at if math.isinf(self._first_text_at) else self._first_text_at
        return Report(
            model=model,
            text=self._text,
            chunks=self.chunks,
            tokens=self._tokens,
            finish_reason=self._finish_reason,
            time_to_first_token_s=first_at - self._sent_at,
            tokens_per_second=self._tokens / max(now - self._sent_at, 1e-9),
        )


def _chunks(response: HTTPResponse) -> Iterator[Any]:
    """Yield the JSON of every event until `[DONE]`; raises `SmokeError` when the stream ends or breaks before."""
    for line in response:
        field, _, data = line.strip().partition(b":")
        if field != b"data":
            continue
        if (text := data.strip()) == b"[DONE]":
            return
        try:
            yield json.loads(text)
        except ValueError:
            raise SmokeError(f"a chunk is not JSON: {_shown(text)}") from None
    raise SmokeError("the stream ended without [DONE]")


def _message(body: str | bytes) -> str | bytes:
    """Return the message that an error body holds, or all of the body when it has an unknown shape."""
    try:
        parsed = json.loads(body)
        found = parsed.get("error", parsed)
        return str(found.get("message") or found["detail"]) if isinstance(found, dict) else str(found)
    except (ValueError, LookupError, AttributeError):
        return body


def _shown(text: str | bytes) -> str:
    words = text.decode(errors="replace") if isinstance(text, bytes) else text
    words = words if len(words) <= _SHOWN_CHARACTERS else words[:_SHOWN_CHARACTERS] + "…"
    return words if words and words.isprintable() else repr(words)


def _for_person(report: Report) -> str:
    text = report.text if len(report.text) <= _SHOWN_CHARACTERS else report.text[:_SHOWN_CHARACTERS] + "…"
    rows = {
        "model": _shown(report.model),
        "text": repr(text),
        "chunks": report.chunks,
        "tokens": report.tokens,
        "finish reason": _shown(report.finish_reason),
        "time to first token": f"{report.time_to_first_token_s * 1e3:.1f} ms",
        "tokens per second": f"{report.tokens_per_second:.1f}",
    }
    return "".join(f"{name:<19}  {value}\n" for name, value in rows.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mockengine smoke",
        allow_abbrev=False,
        description="Send one streamed chat completion to a vLLM frontend and say what came back. "
        "Exit code 0: a complete reply came; 1: it did not, and the output says why; 2: a flag is wrong.",
    )
    parser.add_argument("--url", required=True, help="where the frontend listens, for example http://127.0.0.1:8000")
    parser.add_argument("--model", help="the model to ask (default: the first that the frontend lists)")
    parser.add_argument("--prompt", default="Say hello.", help="what to say (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=_positive_int, default=16, help="longest reply, in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout-s", type=_timeout, default=30.0, help="longest wait for all of it, in seconds (default: %(default)g)"
    )
    parser.add_argument("--api-key", help=f"key of a frontend that wants one (default: {_KEY_VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _positive_int(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text} is not allowed (use a whole number from 1 to {2**31 - 1})")
    return int(text)


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is not allowed (use a number above 0 and up to {_MAX_TIMEOUT_S})")
    return seconds
