# SPDX-License-Identifier: Apache-2.0
"""The page for people: how the engine is, with switches for what goes wrong, and what the port can be asked.

The server makes all of it; a few lines of script fetch the part that changes every second. Nothing comes from
elsewhere.
"""

import json
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse

from mockengine.admin.view import View
from mockengine.faults.rules import Rule
from mockengine.remote import EngineState, Remote
from mockengine.status import RankStatus, Status
from mockengine.transport.desk import DeskClosedError

# Over which tokens per second are counted.
_WINDOW_S: Final = 5.0
_LEAST_S: Final = 0.5
_STYLE: Final = files("mockengine.admin").joinpath("page.css").read_text(encoding="utf-8")
_SCRIPT: Final = files("mockengine.admin").joinpath("page.js").read_text(encoding="utf-8")


def add_page(app: FastAPI, view: View, remote: Remote) -> None:
    """Add the page and the description of the routes to an application."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    rate = _Rate()

    @router.get("/")
    def page() -> HTMLResponse:
        return _html("mockengine", f'<main id="live">{_live(view, remote, rate)}</main>', script=_SCRIPT)

    @router.get("/live")
    def live() -> HTMLResponse:
        return HTMLResponse(_live(view, remote, rate), headers={"Cache-Control": "no-store"})

    @router.get("/docs")
    def docs() -> HTMLResponse:
        return _html("mockengine: the admin port", f"<main>{_routes(app.openapi())}</main>")

    app.include_router(router)


def _html(title: str, body: str, script: str | None = None) -> HTMLResponse:
    """Return a whole page; only what it has itself is ever run or loaded."""
    nonce = secrets.token_urlsafe(16)
    scripts = "" if script is None else f'<script nonce="{nonce}">{script}</script>'
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(title)}</title><style nonce="{nonce}">{_STYLE}</style></head>'
        f"<body>{body}{scripts}</body></html>"
    )
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(text, headers=headers)


class _Rate:
    """Tokens per second, over the last seconds in which somebody has looked."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, tokens: int, now: float) -> float:
        """Take a look at a count that grows, and return how fast it does."""
        self._seen.append((now, tokens))
        while len(self._seen) > 1 and now - self._seen[1][0] > _WINDOW_S:
            self._seen.popleft()
        began, before = self._seen[0]
        return (tokens - before) / (now - began) if now - began >= _LEAST_S else 0.0


# What changes.


def _live(view: View, remote: Remote, rate: _Rate) -> str:
    status = view.status()
    try:
        states: Sequence[EngineState] | None = remote.engines()
    except DeskClosedError:
        states = None
    return "".join(
        [
            _summary(view, status, rate.of(view.counts.output_tokens, time.monotonic())),
            _ranks(status, states),
            _faults(remote),
            _log(view.last_lines()),
        ]
    )


def _summary(view: View, status: Status, tokens_per_s: float) -> str:
    word = "ready" if status.is_ready else status.state.value
    facts = {
        "state": f'<span class="badge {word}">{word}</span>',
        "tokens per second": f"{tokens_per_s:,.0f}",
        "running": f"{sum(rank.running for rank in status.ranks)}",
        "waiting": f"{sum(rank.waiting for rank in status.ranks)}",
        "API servers": f"{status.connected_clients} of {status.clients}",
        "finished": f"{sum(view.counts.finished.values())}",
        "refused": f"{view.counts.refused}",
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f"<h1>mockengine <small>{escape(view.version)}</small></h1><dl>{cells}</dl>"


def _ranks(status: Status, states: Sequence[EngineState] | None) -> str:
    by_rank = {state.engine: state for state in states or ()}
    rows = [_rank(rank, by_rank.get(rank.engine)) for rank in status.ranks]
    remark = '<p class="alarm">The engine\'s loop does not turn.</p>' if states is None else ""
    return f"<h2>Ranks</h2>{remark}{_table(('rank', 'running', 'waiting', 'KV cache', 'state', ''), rows)}"


def _rank(rank: RankStatus, state: EngineState | None) -> Sequence[str]:
    counts = (str(rank.engine), str(rank.running), str(rank.waiting))
    if state is None:
        return (*counts, "", "", "")
    words = [word for word, holds in (("paused", state.is_paused), ("drained", state.is_draining)) if holds]
    action = "rejoin" if state.is_draining else "drain"
    button = _button(action, "POST", f"/v1/engines/{rank.engine}/{action}")
    return (*counts, f"{state.kv_cache_usage:.0%}", ", ".join(words) or "serves", button)


def _faults(remote: Remote) -> str:
    rules = remote.injector.rules
    rows = [_fault(rule, remote.injector.struck(rule.name)) for rule in rules]
    if not rows:
        return "<h2>Faults</h2><p>There are no rules.</p>"
    return f"<h2>Faults</h2>{_table(('on', 'rule', 'what', 'when', 'struck', ''), rows)}"


def _fault(rule: Rule, struck: int) -> Sequence[str]:
    what, when = (part.model_dump(mode="json", exclude_defaults=True) for part in (rule.what, rule.when))
    other = rule.model_copy(update={"enabled": not rule.enabled}).model_dump(mode="json", exclude_none=True)
    checked = " checked" if rule.enabled else ""
    switch = (
        f'<input type="checkbox" role="switch" aria-label="{escape(rule.name)}"{checked} data-method="POST" '
        f'data-path="/v1/faults" data-body="{escape(json.dumps(other))}">'
    )
    path = f"/v1/faults/{rule.name}"
    buttons = _button("fire", "POST", f"{path}/fire") + _button("remove", "DELETE", path)
    said = rule.what.fault + "".join(f", {name} {json.dumps(value)}" for name, value in what.items() if name != "fault")
    held = ", ".join(f"{name} {json.dumps(value)}" for name, value in when.items()) or "always"
    return (switch, escape(rule.name), escape(said), escape(held), str(struck), buttons)


def _log(lines: Sequence[str]) -> str:
    # The last one first: that is what one looks for.
    said = "\n".join(map(escape, reversed(lines)))
    return f'<h2>Log</h2><pre tabindex="0" aria-label="log">{said}</pre>'


def _button(name: str, method: str, path: str) -> str:
    return f'<button data-method="{method}" data-path="{escape(path)}">{name}</button>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(heads)
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{_cells(names, row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(names: Sequence[str], row: Iterable[str]) -> str:
    """Return the cells of a row, each with the name of its column, which a narrow screen shows beside it."""
    return "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in zip(names, row, strict=True))


# What the port can be asked.


def _routes(described: Mapping[str, Any]) -> str:
    parts = ["<h1>The admin port</h1><p>All of it for programs: <a href='/openapi.json'>openapi.json</a>.</p>"]
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            if method == "head":
                continue
            answers = ", ".join(f"{status} {answer['description']}" for status, answer in about["responses"].items())
            text = escape(about.get("description") or about.get("summary", ""))
            body = _body_of(about, described)
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{text}</p>{body}"
                f"<p><small>{escape(answers)}</small></p>"
            )
    return "".join(parts)


def _body_of(about: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    content = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if content is None:
        return ""
    name = str(content.get("$ref", "")).rpartition("/")[2]
    shown = described["components"]["schemas"].get(name, content)
    return f"<details><summary>Body</summary><pre>{escape(json.dumps(shown, indent=2))}</pre></details>"
