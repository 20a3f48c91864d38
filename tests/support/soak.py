# SPDX-License-Identifier: Apache-2.0
"""Everything at once: streams, aborts, calls, faults, settings, and a frontend that is restarted: `make soak`.

Afterwards the accounts are made up: nobody has waited longer than allowed, every request that has started has finished
once, nothing is left in flight, and the engine has not grown.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx

from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import DEFAULT_VERSION, rust_frontend
from mockengine.testing.frontends import RustFrontend
from mockengine.testing.processes import free_port
from tests.support.stack import MODEL, MODEL_NAME, wait_until

WORKERS: Final = 8
# Longer than anything takes on a busy machine, but for what hangs.
DEADLINE_S: Final = 20.0
RESTARTED_EVERY_S: Final = 20.0
MOST_GROWTH_KB: Final = 20_000
_WARM_PART: Final = 0.25
# Nobody hangs by one of these.
_FAULTS: Final[Sequence[Mapping[str, Any]]] = (
    {"name": "errors", "what": {"fault": "error", "retryable": True}, "when": {"probability": 0.3}},
    {"name": "aborts", "what": {"fault": "abort", "after_tokens": 2}, "when": {"probability": 0.3}},
    {"name": "stalls", "what": {"fault": "stall", "for_s": 0.3}, "when": {"probability": 0.3}},
    {"name": "slow", "what": {"fault": "slow", "factor": 3}, "when": {"probability": 0.5}},
    {"name": "twice", "what": "duplicate_final_output", "when": {"probability": 0.3}},
    {"name": "stranger", "what": "unknown_id", "when": {"probability": 0.3}},
    {"name": "miscounts", "what": "wrong_counts", "when": {"probability": 0.3}},
    {"name": "freezes", "what": {"fault": "freeze", "for_s": 0.2}, "when": {"every": 50}},
    {"name": "cut", "what": {"fault": "disconnect", "for_s": 0.2}, "when": {"every": 80}},
)


@dataclass
class Accounts:
    """What has come of everything.

    Attributes:
        done: what was done, by what came of it.
        slow: what took longer than allowed.
        frontends: how many there were.
        warm_kb, last_kb: what the engine took when it was warm, and at the end.

    """

    done: Counter[str] = field(default_factory=Counter)
    slow: list[str] = field(default_factory=list)
    frontends: int = 1
    warm_kb: int = 0
    last_kb: int = 0


class Soak:
    """One engine and one frontend after the other."""

    def __init__(self, seconds: float, seed: int = 1) -> None:
        self._seconds = seconds
        self._seed = seed
        self._admin_port = free_port()
        self._http_port, self._handshake_port = free_port(), free_port()
        self._ends_at = 0.0
        self.accounts = Accounts()

    def run(self) -> Accounts:
        """Do it all; raises AssertionError where the accounts do not balance."""
        flags = (f"--handshake-address=tcp://127.0.0.1:{self._handshake_port}", f"--admin-port={self._admin_port}")
        with EngineProcess(*flags, "--itl-ms=2", "--rejoin-grace-s=0.3") as engine:
            self._ends_at = time.monotonic() + self._seconds
            workers = [threading.Thread(target=self._work, args=(number,)) for number in range(WORKERS)]
            workers.append(threading.Thread(target=self._measure, args=(engine.process.pid,)))
            with self._frontend() as frontend:
                frontend.wait_healthy(besides=engine)
                for worker in workers:
                    worker.start()
                self._sleep(RESTARTED_EVERY_S)
                frontend.kill()
            self._restart_frontends(engine)
            for worker in workers:
                worker.join()
            self._settle(engine)
        return self.accounts

    def _frontend(self) -> RustFrontend:
        return RustFrontend(
            rust_frontend(DEFAULT_VERSION),
            MODEL,
            handshake_port=self._handshake_port,
            http_port=self._http_port,
            env={"VLLM_SERVER_DEV_MODE": "1"},
        )

    def _restart_frontends(self, engine: EngineProcess) -> None:
        """Kill the frontend now and then, and see that the last one serves."""
        is_last = False
        while not is_last:
            with self._frontend() as frontend:
                self.accounts.frontends += 1
                frontend.wait_healthy(besides=engine)
                self._sleep(RESTARTED_EVERY_S)
                is_last = time.monotonic() >= self._ends_at
                if is_last:
                    self._clear()
                    wait_until(self._status, (httpx.codes.OK).__eq__, "the status of a last request")
                frontend.kill()

    def _sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self._ends_at - time.monotonic())))

    # What workers do.

    def _work(self, number: int) -> None:
        draw = Random(self._seed * 1_000 + number)  # noqa: S311 - nothing is secret here
        doings: Sequence[Callable[[Random, httpx.Client], str]] = (
            *(self._complete, self._complete, self._stream, self._stream, self._leave, self._call),
            *(self._look, self._change, self._fault),
        )
        with httpx.Client(timeout=DEADLINE_S, trust_env=False) as client:
            while time.monotonic() < self._ends_at:
                doing = draw.choice(doings)
                began = time.monotonic()
                try:
                    came = doing(draw, client)
                except httpx.TimeoutException:
                    came = "hangs"
                except httpx.HTTPError:
                    # The frontend was killed under it, or is not there yet.
                    came = "breaks off"
                    time.sleep(0.05)
                took = time.monotonic() - began
                self.accounts.done[f"{doing.__name__.strip('_')}: {came}"] += 1
                if came == "hangs" or took > DEADLINE_S:
                    self.accounts.slow.append(f"{doing.__name__.strip('_')}, {took:.1f} s")

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def _admin(self) -> str:
        return f"http://127.0.0.1:{self._admin_port}"

    def _body(self, draw: Random, *, stream: bool) -> dict[str, Any]:
        prompt = "Hi " * draw.randint(1, 40)
        return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": draw.randint(1, 60), "stream": stream}

    def _complete(self, draw: Random, client: httpx.Client) -> str:
        return str(client.post(f"{self._url}/v1/completions", json=self._body(draw, stream=False)).status_code)

    def _stream(self, draw: Random, client: httpx.Client) -> str:
        with client.stream("POST", f"{self._url}/v1/completions", json=self._body(draw, stream=True)) as reply:
            for _ in reply.iter_raw():
                pass
            return str(reply.status_code)

    def _leave(self, draw: Random, client: httpx.Client) -> str:
        body = self._body(draw, stream=True) | {"max_tokens": 2_000}
        with client.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
            for number, _ in enumerate(reply.iter_raw()):
                if number == draw.randint(0, 5):
                    break
            return str(reply.status_code)

    def _call(self, draw: Random, client: httpx.Client) -> str:
        method, path = draw.choice((("GET", "/is_sleeping"), ("POST", "/reset_prefix_cache"), ("GET", "/is_paused")))
        return str(client.request(method, f"{self._url}{path}").status_code)

    def _look(self, draw: Random, client: httpx.Client) -> str:
        path = draw.choice(("/health", "/metrics", "/v1/requests", "/v1/engines", "/v1/settings", "/live"))
        return str(client.get(f"{self._admin}{path}").status_code)

    def _change(self, draw: Random, client: httpx.Client) -> str:
        changes = {"itl_ms": draw.choice((0.5, 1, 2, 5)), "output_length": draw.choice(("max_tokens", "uniform:1:30"))}
        return str(client.patch(f"{self._admin}/v1/settings", json=changes).status_code)

    def _fault(self, draw: Random, client: httpx.Client) -> str:
        rule = draw.choice(_FAULTS)
        if draw.random() < 0.6:
            return str(client.delete(f"{self._admin}/v1/faults/{rule['name']}").status_code)
        return str(client.post(f"{self._admin}/v1/faults", json=rule).status_code)

    # The accounts.

    def _measure(self, pid: int) -> None:
        self._sleep(_WARM_PART * self._seconds)
        self.accounts.warm_kb = _resident_kb(pid)

    def _clear(self) -> None:
        httpx.delete(f"{self._admin}/v1/faults", timeout=DEADLINE_S, trust_env=False)

    def _status(self) -> int | None:
        body = {"model": MODEL_NAME, "prompt": "Hi", "max_tokens": 2}
        with suppress(httpx.HTTPError):
            return httpx.post(f"{self._url}/v1/completions", json=body, timeout=5, trust_env=False).status_code
        return None

    def _settle(self, engine: EngineProcess) -> None:
        accounts = self.accounts
        engine.wait_for("frontend lost", lambda _: len(engine.logged("frontend lost")) == accounts.frontends)
        accounts.last_kb = _resident_kb(engine.process.pid)
        assert accounts.slow == [], accounts.slow
        started = Counter(entry["request_id"] for entry in engine.logged("request started"))
        finished = Counter(entry["request_id"] for entry in engine.logged("request finished"))
        assert started == finished, [*(started - finished), *(finished - started)][:10]
        assert not [entry for entry in engine.log if entry["level"] == "error"]
        assert accounts.last_kb - accounts.warm_kb < MOST_GROWTH_KB, (accounts.warm_kb, accounts.last_kb)


def _resident_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main(argv: Sequence[str]) -> int:
    """Soak for as many seconds as the first argument says, and print the accounts."""
    accounts = Soak(float(argv[0])).run()
    print(json.dumps(dict(sorted(accounts.done.items())), indent=2))  # noqa: T201 - it is what is asked for
    print(f"{accounts.frontends} frontends, {accounts.warm_kb} kB warm, {accounts.last_kb} kB at the end")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
