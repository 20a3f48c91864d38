# SPDX-License-Identifier: Apache-2.0
"""Asks a running engine about itself and changes it, over its admin port, for `mockengine ctl`."""

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from mockengine.faults.rules import RulesError
from mockengine.faults.source import read_rules

USAGE: Final = """\
usage: mockengine ctl [FLAGS] ORDER

Orders:
  settings                  print the settings in effect
  settings NAME=VALUE ...   change settings; NAME= is the default
  faults                    print the rules of faults, and how often each has struck
  faults put RULES          add rules, or replace those of their names: JSON, or a file
  faults remove NAME        remove a rule, and end what it has begun
  faults clear              remove all rules
  faults fire NAME          let a rule strike, whatever its conditions
  engines                   print the ranks
  requests                  print the requests in flight
  drain RANK                have a rank refuse new requests
  rejoin RANK               have it take them again
  crash RANK [EXIT_CODE]    end its process at once

Where the engine is follows from --admin-host and --admin-port, its secret from MOCKENGINE_ADMIN_TOKEN, as everywhere.
Answers are JSON. Exit code 0: done; 1: the engine refused, or did not answer; 2: wrong use.
"""
# Longer than an engine waits for its own thread.
_TIMEOUT_S: Final = 10.0
_ALL_ADDRESSES: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound here


class UsageError(Exception):
    """The words make no order; the text says why."""


class OrderError(Exception):
    """The engine refused or did not answer; the text says why."""


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the admin port of an engine is, and the secret that changes take, if there is one."""

    host: str
    port: int
    token: str | None = None

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Send one request and return the answer.

        Raises:
            OrderError: there is none, or it is a refusal.

        """
        where = f"the admin port at {self.host}, port {self.port}"
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        connection = http.client.HTTPConnection(_ALL_ADDRESSES.get(self.host, self.host), self.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            said = response.read()
            answer = json.loads(said)
        except TimeoutError:
            raise OrderError(f"{where} did not answer within {_TIMEOUT_S:g} s") from None
        except OSError as error:
            advice = "is the engine running, and does a variable or flag here name its admin_port?"
            raise OrderError(f"{where} does not answer: {error.strerror or error} ({advice})") from error
        except (ValueError, http.client.HTTPException) as error:
            raise OrderError(f"{where} does not answer as an engine does: does something else listen there?") from error
        finally:
            connection.close()
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise OrderError(_refusal(answer))
        return answer


def _refusal(answer: object) -> str:
    detail = answer.get("detail") if isinstance(answer, dict) else answer
    return "\n  ".join(["the engine refuses:", *map(str, detail)]) if isinstance(detail, list) else str(detail)


def obey(address: AdminAddress, words: Sequence[str]) -> Any:
    """Carry an order out and return the answer.

    Raises:
        UsageError: it is none.
        OrderError: the engine refused or did not answer.

    """
    order, *rest = words or [""]
    if order not in _ORDERS:
        raise UsageError(f"there is no order {order!r} (use {', '.join(_ORDERS)})")
    return _ORDERS[order](address, rest)


def _settings(address: AdminAddress, words: Sequence[str]) -> Any:
    if not words:
        return address.request("GET", "/v1/settings")
    changes: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            raise UsageError(f"{word}: a change is NAME=VALUE")
        changes[name.replace("-", "_")] = value or None
    changed = address.request("PATCH", "/v1/settings", changes)
    return {name: changed[name] for name in changes}


def _faults(address: AdminAddress, words: Sequence[str]) -> Any:
    match list(words):
        case []:
            return address.request("GET", "/v1/faults")
        case ["put", text]:
            try:
                rules = read_rules(text)
            except RulesError as error:
                raise UsageError(str(error)) from error
            answer = None
            for rule in rules:
                answer = address.request("POST", "/v1/faults", rule.model_dump(mode="json", exclude_none=True))
            return answer
        case ["remove", name]:
            return address.request("DELETE", f"/v1/faults/{quote(name, safe='')}")
        case ["clear"]:
            return address.request("DELETE", "/v1/faults")
        case ["fire", name]:
            return address.request("POST", f"/v1/faults/{quote(name, safe='')}/fire")
    raise UsageError("faults takes nothing, put RULES, remove NAME, clear or fire NAME")


def _asking(path: str) -> Callable[[AdminAddress, Sequence[str]], Any]:
    def ask(address: AdminAddress, words: Sequence[str]) -> Any:
        if words:
            raise UsageError(f"{words[0]}: not expected here")
        return address.request("GET", path)

    return ask


def _ordering(action: str) -> Callable[[AdminAddress, Sequence[str]], Any]:
    def order(address: AdminAddress, words: Sequence[str]) -> Any:
        if len(words) != 1 or not words[0].isdecimal():
            raise UsageError(f"{action} takes the number of a rank")
        return address.request("POST", f"/v1/engines/{words[0]}/{action}")

    return order


def _crash(address: AdminAddress, words: Sequence[str]) -> Any:
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words):
        raise UsageError("crash takes the number of a rank and perhaps an exit code")
    body = {"exit_code": int(words[1])} if len(words) == 2 else {}  # noqa: PLR2004 - the rank and the code
    return address.request("POST", f"/v1/engines/{words[0]}/crash", body)


_ORDERS: Final[Mapping[str, Callable[[AdminAddress, Sequence[str]], Any]]] = {
    "settings": _settings,
    "faults": _faults,
    "engines": _asking("/v1/engines"),
    "requests": _asking("/v1/requests"),
    "drain": _ordering("drain"),
    "rejoin": _ordering("rejoin"),
    "crash": _crash,
}
