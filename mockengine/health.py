# SPDX-License-Identifier: Apache-2.0
"""Asks an engine's admin port whether it is alive, for `mockengine health`.

Container probes run that every few seconds, so it imports next to nothing, the settings' own machinery least of all.
"""

import json
import socket
import time
from collections.abc import Mapping
from typing import Final

_VARIABLES: Final = ("MOCKENGINE_CONFIG", "MOCKENGINE_ADMIN_HOST", "MOCKENGINE_ADMIN_PORT")
_DEFAULT_HOST: Final = "127.0.0.1"
_PORTS: Final = range(1, 2**16)
# What listens at all addresses is asked at the loopback one.
_ALL_ADDRESSES: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound here
# A little more than an engine waits for its loop before it says that it is stuck.
_TIMEOUT_S: Final = 3.0
_MOST_BYTES: Final = 65_536


def address_from(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the admin port where the variables alone name them plainly, else None."""
    config, host, port = (environ.get(name, "") for name in _VARIABLES)
    if config or not (port.isascii() and port.isdigit()) or int(port) not in _PORTS:
        return None
    return host or _DEFAULT_HOST, int(port)


def ask(host: str, port: int) -> tuple[bool, str]:
    """Ask the admin port at that address; return whether the engine is alive, and one line that says so or why not."""
    where = f"the admin port at {host}, port {port}"
    try:
        head, _, body = _get_health(_ALL_ADDRESSES.get(host, host), port).partition(b"\r\n\r\n")
        answer = json.loads(body)
        word, reason = str(answer["status"]), answer.get("reason")
    except TimeoutError:
        return False, f"{where} did not answer within {_TIMEOUT_S:g} s: the engine hangs"
    except OSError as error:
        advice = "is the engine running, and does a variable or flag here name its admin_port?"
        return False, f"{where} does not answer: {error.strerror or error} ({advice})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return False, f"{where} does not answer as an engine does: does something else listen there?"
    return b" 200 " in head.partition(b"\r\n")[0], word if reason is None else f"{word}: {reason}"


def _get_health(host: str, port: int) -> bytes:
    """Return all of the response. The library for this takes longer to import than the rest of a probe together."""
    with socket.create_connection((host, port), _TIMEOUT_S) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        end = time.monotonic() + _TIMEOUT_S
        response = b""
        while len(response) < _MOST_BYTES and (received := connection.recv(_MOST_BYTES)):
            response += received
            if time.monotonic() > end:
                raise TimeoutError
        return response
