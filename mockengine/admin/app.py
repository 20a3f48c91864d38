# SPDX-License-Identifier: Apache-2.0
"""The routes of the admin port."""

import asyncio
import time
from http import HTTPStatus
from typing import Final, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel

from mockengine.admin.control import add_control
from mockengine.admin.metrics import make_registry
from mockengine.admin.page import add_page
from mockengine.admin.view import View
from mockengine.remote import Remote
from mockengine.status import State, Status

HEALTH_PATIENCE_S: Final = 1.5
"""How long the loop has to turn before it counts as stuck; probes must wait longer than this for the answer."""

# An engine that works turns within a millisecond or two of being woken.
_LOOK_AGAIN_S: Final = 0.002
_METHODS: Final = ["GET", "HEAD"]


class Health(BaseModel):
    """Whether the process is alive: whether a frontend is joined does not matter."""

    status: Literal["ok", "failing"]
    reason: str | None = None


class RankReadiness(BaseModel):
    """One rank."""

    engine: int
    state: State
    running: int
    waiting: int


class Readiness(BaseModel):
    """Whether requests are served: every rank has joined and every API server of the frontend is connected."""

    status: Literal["ready", "joining", "disconnected", "leaving"]
    clients: int
    connected_clients: int
    ranks: list[RankReadiness]


def make_app(view: View, remote: Remote) -> FastAPI:
    """Return the application that answers from `view`, and changes the engine by `remote`."""
    app = FastAPI(title="mockengine", version=view.version, docs_url=None, redoc_url=None)
    add_control(app, remote)
    add_page(app, view, remote)
    registry = make_registry(view)

    @app.api_route("/health", methods=_METHODS, response_model_exclude_none=True, responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """Tell whether the engine's thread goes on."""
        reason = await _reason_for_doubt(view)
        if reason is None:
            return Health(status="ok")
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return Health(status="failing", reason=reason)

    @app.api_route("/ready", methods=_METHODS, responses={503: {"model": Readiness}})
    @app.api_route("/health/ready", methods=_METHODS, responses={503: {"model": Readiness}}, name="health_ready")
    async def ready(response: Response) -> Readiness:
        """Tell whether requests are served."""
        status = view.status()
        if not status.is_ready:
            response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        return _readiness(status)

    @app.api_route("/metrics", methods=_METHODS, response_class=Response)
    async def metrics(request: Request) -> Response:
        """Tell the engine's own numbers, in the format that Prometheus asks for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    @app.exception_handler(HTTPStatus.NOT_FOUND)
    async def not_found(request: Request, _error: HTTPException) -> JSONResponse:
        paths = sorted({route.path for route in app.routes if isinstance(route, APIRoute)})
        detail = f"there is no {request.url.path} here (use {', '.join(paths)})"
        return JSONResponse({"detail": detail}, HTTPStatus.NOT_FOUND)

    return app


async def _reason_for_doubt(view: View) -> str | None:
    """Wake the engine's thread and see whether it turns; return why it seems to be stuck, or None."""
    asked = time.monotonic()
    view.wake()
    while True:
        status = view.status()
        # A process that leaves waits for sockets at the end, not for its loop.
        if status.turned_at >= asked or status.state is State.LEAVING:
            return None
        now = time.monotonic()
        if now >= asked + HEALTH_PATIENCE_S:
            return f"the engine's loop has not turned for {now - status.turned_at:.1f} s"
        await asyncio.sleep(_LOOK_AGAIN_S)


def _readiness(status: Status) -> Readiness:
    if status.is_ready:
        word: Literal["ready", "joining", "disconnected", "leaving"] = "ready"
    elif status.state is State.SERVING:
        word = "disconnected"
    else:
        word = "joining" if status.state is State.JOINING else "leaving"
    return Readiness(
        status=word,
        clients=status.clients,
        connected_clients=status.connected_clients,
        ranks=[
            RankReadiness(engine=rank.engine, state=status.state, running=rank.running, waiting=rank.waiting)
            for rank in status.ranks
        ],
    )
