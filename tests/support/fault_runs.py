# SPDX-License-Identifier: Apache-2.0
"""Lets every fault strike beside real frontends and writes down what these do then: `make faults`.

The tables of docs/faults.md are written by this, and the tests run it again and compare.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from typing import Any, Final, get_args

import httpx

from mockengine.faults.catalog import KINDS, CallKind, EngineKind, JoinKind, OutputKind, RequestKind, texts_of
from mockengine.faults.fault import Fault
from mockengine.faults.rules import Rule, When
from mockengine.testing.engine import EngineProcess
from mockengine.testing.fetch import rust_frontend
from mockengine.testing.frontends import SERVED_MODEL_NAME, Frontend, PythonFrontend, RustFrontend
from tests.support.failure_modes import PATIENCE_S, what_a_new_request_gets, what_became_of, what_health_says
from tests.support.python_frontend import VLLM_VERSION, python_frontend
from tests.support.stack import MODEL, MOE_MODEL, ROOT, wait_until
from tests.support.streams import Stream
from tests.support.written_page import Row, WrittenPage, lines_of, table

PAGE: Final = WrittenPage(ROOT / "docs" / "faults.md", "make faults")
RUST_VERSIONS: Final = ("0.33.0", "0.30.0", "0.27.1", "0.24.0")
PYTHON: Final = f"Python {VLLM_VERSION}"
FRONTENDS: Final = (*(f"Rust {version}" for version in RUST_VERSIONS), PYTHON)

_DEV_MODE: Final = {"VLLM_SERVER_DEV_MODE": "1"}
_OK: Final = "200"
_PYTHON_JOINS_S: Final = 60.0
# What comes first decides: a connection that is seen to be gone, or nothing at all.
_WHILE_IT_ENDS: Final[Mapping[str, Sequence[str]]] = {
    "stream beside it": ("error 500", "the connection breaks off"),
    "new request": ("500", "refused"),
    "`/health`": ("503", "refused"),
}
_EITHER: Final = {"`crash`, `notice: false`": ("500", "hangs")}
_MOST_BODY: Final = 120
# Such that a stream is still there at the end, and one that goes on is seen to.
_ITL_MS: Final = 50


@dataclass(frozen=True)
class Trial:
    """One fault as it is let strike.

    Attributes:
        fault: its name.
        fields: what else it takes.
        call: method and route of HTTP that call a utility, and the utility's method, for faults of calls.
        is_of_join: whether it strikes while the engine joins.
        flags: of the engine, besides.
        has_waves: whether the model is a mixture of experts, of two ranks.

    """

    fault: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    call: tuple[str, str, str] | None = None
    is_of_join: bool = False
    flags: Sequence[str] = ()
    has_waves: bool = False

    @property
    def label(self) -> str:
        """Return its name in the tables."""
        return ", ".join([f"`{self.fault}`", *(f"`{name}: {dumps(value)}`" for name, value in self.fields.items())])

    @property
    def name(self) -> str:
        """Return the name of its rule, which is part of the id of the request that it strikes."""
        return "-".join(["strike", self.fault, *(f"{name}.{value}" for name, value in self.fields.items()), "end"])

    @property
    def rule(self) -> Mapping[str, Any]:
        """Return the rule that has it strike."""
        when: Mapping[str, Any] = {"request_id": self.name}
        if self.is_of_join:
            when = {}
        elif self.call is not None:
            when = {"method": self.call[2]}
        return {"name": self.name, "what": {"fault": self.fault, **self.fields}, "when": when}

    @property
    def is_alone(self) -> bool:
        """Whether it takes an engine or a join of its own."""
        return self.is_of_join or self.has_waves or self.call is not None or bool(self.flags)


# Which every release has.
_CALL: Final = ("GET", "/is_sleeping", "is_sleeping")
_SPECIAL: Final[Mapping[str, Sequence[Trial]]] = {
    "error": [
        Trial("error"),
        Trial("error", {"code": "validation_error"}),
        Trial("error", {"retryable": True}),
        Trial("error", {"after_tokens": 2}),
    ],
    "stall": [Trial("stall"), Trial("stall", {"for_s": 1})],
    "no_reply": [Trial("no_reply", call=_CALL)],
    "repeated_reply": [Trial("repeated_reply", call=_CALL)],
    "failed_reply": [Trial("failed_reply", call=_CALL)],
    "crash": [Trial("crash"), Trial("crash", {"notice": False})],
    "freeze": [Trial("freeze"), Trial("freeze", {"for_s": 1})],
    "freeze_rank": [Trial("freeze_rank"), Trial("freeze_rank", {"for_s": 1})],
    "kv_cache_full": [Trial("kv_cache_full", flags=("--load-model=vllm", "--timing=per_request"))],
    "stale_wave": [Trial("stale_wave", has_waves=True)],
    "late_ready": [Trial("late_ready", {"delay_s": 1}, is_of_join=True)],
    **{name: [Trial(name, is_of_join=True)] for name in ("wrong_ready", "missing_ready_field", "duplicate_hello")},
}
TRIALS: Final = tuple(trial for kind in KINDS for trial in _SPECIAL.get(kind.name(), [Trial(kind.name())]))


# What is seen.


def _seen_of(response: httpx.Response) -> str:
    """Return status and what is said, in words."""
    try:
        body = response.json()
    except ValueError:
        return str(response.status_code)
    if not isinstance(body, dict):
        return str(response.status_code)
    error = body.get("error")
    if error is not None:
        message = error.get("message", "") if isinstance(error, dict) else str(error)
        return f"{response.status_code}: {_short(message)}".removesuffix(": ")
    for choice in body.get("choices", ()):
        tokens = body["usage"]["completion_tokens"]
        return f"{response.status_code}, `finish_reason` `{choice['finish_reason']}`, {tokens} tokens"
    return str(response.status_code)


def _short(message: str) -> str:
    line = " ".join(str(message).split()).replace("|", "/")
    return line if len(line) <= _MOST_BODY else line[:_MOST_BODY] + "…"


def _asked(ask: Callable[[], httpx.Response]) -> str:
    try:
        return _seen_of(ask())
    except httpx.TimeoutException:
        return "hangs"
    except httpx.ConnectError:
        return "refused"
    except httpx.HTTPError:
        return "the connection breaks off"


def _strike(url: str, trial: Trial) -> str:
    """Have the fault strike, and return what its client gets."""
    if trial.call is not None:
        method, route, _ = trial.call
        return _asked(lambda: httpx.request(method, f"{url}{route}", timeout=PATIENCE_S, trust_env=False))
    body = {"model": SERVED_MODEL_NAME, "prompt": "Hello", "max_tokens": 4}
    headers = {"X-Request-Id": trial.name}
    return _asked(
        lambda: httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S, trust_env=False)
    )


def _aftermath(frontend: Frontend) -> Row:
    """Look at a frontend after a fault; one that notices only when it is spoken to has been spoken to before that."""
    new = what_a_new_request_gets(frontend.url)
    health = what_health_says(frontend.url)
    is_well = new == health == _OK
    process = "goes on" if is_well and not frontend.has_ended else what_became_of(frontend)
    return {"new request": new, "`/health`": health, "frontend's process": process}


def _is_well(row: Row) -> bool:
    return row["new request"] == row["`/health`"] == _OK and row["stream beside it"] == "goes on"


@contextmanager
def _stage(
    make_frontend: Callable[[Path, int], Frontend], trials: Sequence[Trial]
) -> Iterator[tuple[Frontend, EngineProcess]]:
    """Start a frontend and an engine with the rules for some trials."""
    model, ranks = (MOE_MODEL, 2) if trials[0].has_waves else (MODEL, 1)
    rules = dumps([trial.rule for trial in trials])
    hashes = _hash_flags(make_frontend, trials[0])
    with make_frontend(model, ranks) as frontend:
        flags = (
            f"--handshake-address={frontend.handshake_address}",
            f"--engine-count={ranks}",
            *trials[0].flags,
            *hashes,
        )
        with EngineProcess(*flags, f"--itl-ms={_ITL_MS}", f"--faults={rules}") as engine:
            yield frontend, engine


def _hash_flags(make_frontend: Callable[[Path, int], Frontend], trial: Trial) -> Sequence[str]:
    """Return the flag that a Python frontend of a mixture of experts wants to see, which it says when it is wrong."""
    if not trial.has_waves:
        return ()
    with make_frontend(MOE_MODEL, 2) as refusing:
        if isinstance(refusing, RustFrontend):
            return ()
        with EngineProcess(f"--handshake-address={refusing.handshake_address}", "--engine-count=2"):
            refusing.wait(refusing.slow_start_s)
        expected = re.search(r"Expected hash: ([0-9a-f]{64})", refusing.output)
        assert expected is not None, refusing.tail
        return (f"--parallel-config-hash={expected[1]}",)


def _observed_in_turn(trials: Sequence[Trial], frontend_name: str) -> Iterator[Row]:
    """Let faults strike one after the other, as long as frontend and engine stand it, and yield what was seen."""
    with _stage(_factory(frontend_name), trials) as (frontend, engine):
        if trials[0].is_of_join:
            yield _observed_join(frontend, engine)
            return
        frontend.wait_healthy(besides=engine)
        wait_until(lambda: what_a_new_request_gets(frontend.url), _OK.__eq__, "what a first request gets")
        for trial in trials:
            row = _observed_one(trial, frontend, engine)
            yield row
            if not _is_well(row):
                return


def _observed_one(trial: Trial, frontend: Frontend, engine: EngineProcess) -> Row:
    with Stream(frontend) as beside:
        beside.wait_for_tokens(1)
        struck = _strike(frontend.url, trial)
        engine.wait_for("fault fired", lambda entry: entry["rule"] == trial.name)
        row = {"the request": struck, "stream beside it": _short(beside.sees(PATIENCE_S)), **_aftermath(frontend)}
    if row["new request"] in _EITHER.get(trial.label, ()):
        row["new request"] = " or ".join(_EITHER[trial.label])
    return settled(row)


def settled(row: Row) -> Row:
    """Return what was seen with both ways in which that goes where a process ends meanwhile."""
    if row["frontend's process"] == "goes on":
        return row
    found = dict(row)
    for column, ways in _WHILE_IT_ENDS.items():
        if found[column].partition(":")[0] in ways:
            found[column] = " or ".join(ways)
    return found


def _observed_join(frontend: Frontend, engine: EngineProcess) -> Row:
    engine.wait_for("fault fired", deadline_s=frontend.slow_start_s)
    end = time.monotonic() + (PATIENCE_S if isinstance(frontend, RustFrontend) else _PYTHON_JOINS_S)
    while time.monotonic() < end and not frontend.is_healthy and not frontend.has_ended:
        time.sleep(0.05)
    return _aftermath(frontend)


def _factory(name: str) -> Callable[[Path, int], Frontend]:
    kind, version = name.split()
    if kind == "Rust":
        executable = rust_frontend(version)
        return lambda model, ranks: RustFrontend(executable, model, data_parallel_size=ranks, env=_DEV_MODE)
    python = python_frontend(report=print)
    return lambda model, ranks: PythonFrontend(
        python, model, data_parallel_size=ranks, api_server_count=1, env=_DEV_MODE
    )


def observed(frontend_name: str, trials: Sequence[Trial] = TRIALS) -> Mapping[str, Row]:
    """Let faults strike beside frontends named as in the tables, and return what was seen by label.

    A Rust frontend is there at once, so each has its own; a Python frontend takes many seconds, so it serves until
    something has broken it.
    """
    if frontend_name != PYTHON:
        queues = [[trial] for trial in trials]
    else:
        together = [trial for trial in trials if not trial.is_alone]
        queues = [together[::2], together[1::2], *([trial] for trial in trials if trial.is_alone)]
    found: dict[str, Row] = {}

    def work_off(queue: list[Trial]) -> None:
        while queue:
            rows = list(_observed_in_turn(queue, frontend_name))
            found.update(zip([trial.label for trial in queue], rows, strict=False))
            del queue[: len(rows)]

    with ThreadPoolExecutor(2 if frontend_name == PYTHON else 4) as pool:
        list(pool.map(work_off, queues))
    return found


# The page.

SECTIONS: Final = {
    "of requests": RequestKind,
    "of messages": OutputKind,
    "of calls": CallKind,
    "of the engine": EngineKind,
    "of joining": JoinKind,
}
"""Parts of the page, by name."""


def part_of(trial: Trial) -> str:
    """Return the part of the page that a fault is in."""
    return next(name for name, kinds in SECTIONS.items() if trial.fault in [kind.name() for kind in get_args(kinds)])


def described(section: str) -> str:
    """Return the text about the faults of a section: it follows from their classes."""
    kinds: Sequence[type[Fault]] = get_args(SECTIONS[section])
    rows = []
    for kind in kinds:
        texts = texts_of(kind)
        fields = [
            f"`{name}`: {about.description} ({_default(about.default)})"
            for name, about in kind.model_fields.items()
            if name != "fault"
        ]
        rows.append([f"`{kind.name()}`", texts["what"], "<br>".join(fields), texts["cause"]])
    return lines_of(["fault", "what happens", "what it takes", "a real cause"], rows)


def keys_of_rules() -> str:
    """Return the table of what a rule may have."""
    rows = [[f"`{name}`", str(about.description)] for name, about in Rule.model_fields.items()]
    rows += [[f"`when.{name}`", str(about.description)] for name, about in When.model_fields.items()]
    return lines_of(["key", "meaning"], rows)


def _default(value: object) -> str:
    return "left out" if value is None else f"`{dumps(value)}`"


def write_texts() -> None:
    """Write what follows from the classes."""
    PAGE.write("rules", keys_of_rules())
    for section in SECTIONS:
        PAGE.write(f"faults {section}", described(section))


def documented(trial: Trial, frontend: str) -> Row:
    """Return what the page says about that frontend and that fault."""
    return PAGE.rows(f"{frontend}, faults {part_of(trial)}")[trial.label]


def main(argv: Sequence[str]) -> int:
    """Write the texts and the tables of all frontends anew, or those that `argv` names."""
    write_texts()
    for frontend in argv or FRONTENDS:
        rows = observed(frontend)
        for label, row in rows.items():
            print(f"{frontend}, {label}: {row}", flush=True)  # noqa: T201 - a person may watch
        for section in SECTIONS:
            labels = [trial.label for trial in TRIALS if part_of(trial) == section]
            PAGE.write(f"{frontend}, faults {section}", table("fault", {label: rows[label] for label in labels}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
