# SPDX-License-Identifier: Apache-2.0
"""A client that reads a long streamed reply in the background."""

import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from mockengine.testing.frontends import SERVED_MODEL_NAME, Frontend
from tests.support.stack import DEADLINE_S

_GOES_ON: Final = 2


class Stream:
    """A completion of 10 000 tokens while the context lasts.

    Attributes:
        events: how many have arrived that say something.

    """

    def __init__(self, frontend: Frontend, max_tokens: int = 10_000) -> None:
        self.events = 0
        self._max_tokens = max_tokens
        self._end = "the connection breaks off"
        self._connection = http.client.HTTPConnection("127.0.0.1", frontend.http_port)
        self._connection.connect()
        # The connection forgets it when the response has begun or ended.
        self._socket: socket.socket = self._connection.sock
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def wait_for_tokens(self, count: int) -> None:
        """Wait until so many more events have come."""
        end, wanted = time.monotonic() + DEADLINE_S, self.events + count
        while self.events < wanted:
            assert self._thread.is_alive(), f"the stream has ended: {self._end}"
            assert time.monotonic() < end, f"{self.events} events after {DEADLINE_S:g} s"
            time.sleep(0.01)

    def sees(self, patience_s: float) -> str:
        """Return in words whether the stream goes on, hangs for that long, or how it has ended."""
        end, wanted = time.monotonic() + patience_s, self.events + _GOES_ON
        while time.monotonic() < end:
            if not self._thread.is_alive():
                return self._end
            if self.events >= wanted:
                return "goes on"
            time.sleep(0.01)
        return "hangs"

    def _read(self) -> None:
        body = {"model": SERVED_MODEL_NAME, "prompt": "Hi", "max_tokens": self._max_tokens, "stream": True}
        # What was seen last is how it ended.
        with suppress(OSError, http.client.HTTPException, ValueError):
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
            self.events += 1
            if choice.get("finish_reason"):
                self._end = f"`finish_reason` `{choice['finish_reason']}`"
