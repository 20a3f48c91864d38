# SPDX-License-Identifier: Apache-2.0
"""The routes of the admin port that ask a running engine about itself and change it."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, BackgroundTasks, Body, Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from mockengine.admin.guard import BodyLimit, make_guard
from mockengine.faults.rules import Rule
from mockengine.remote import EngineState, RefusedError, Remote, RequestState, UnknownError
from mockengine.settings import LIVE
from mockengine.transport.desk import DeskClosedError

_Changes = Annotated[dict[str, str | float | int | bool | None], Body(examples=[{"itl_ms": 20, "log_requests": False}])]
Rank = Annotated[int, Path(ge=0, lt=2**16, description="Index of a rank of this process.")]
RuleName = Annotated[str, Path(min_length=1, max_length=64, description="Name of a rule.")]
_NAMES: Final = ", ".join(sorted(LIVE))


class Problems(BaseModel):
    """What is wrong with what was asked."""

    detail: str | list[str]


class FaultState(BaseModel):
    """A rule, and how often it has struck."""

    rule: Rule
    struck: int


class CrashOrder(BaseModel):
    """How a process ends."""

    notice: bool = Field(default=True, description="Whether it says `ENGINE_CORE_DEAD` before.")
    exit_code: int = Field(default=1, ge=0, le=255, description="Code that it exits with.")


_OF_CHANGES: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": Problems},
    401: {"model": Problems},
    403: {"model": Problems},
    413: {"model": Problems},
    422: {"model": Problems},
    503: {"model": Problems},
}
_UNKNOWN: Final[dict[int | str, dict[str, Any]]] = {404: {"model": Problems}}
_STUCK: Final[dict[int | str, dict[str, Any]]] = {503: {"model": Problems}}


def add_control(app: FastAPI, remote: Remote) -> None:
    """Add these routes to an application."""
    may_change = [Depends(make_guard(lambda: remote.setup.settings))]
    app.include_router(_of_settings(remote, may_change))
    app.include_router(_of_faults(remote, may_change))
    app.include_router(_of_engines(remote, may_change))
    app.add_middleware(BodyLimit)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(UnknownError, _unknown)
    app.add_exception_handler(DeskClosedError, _stuck)


def _of_settings(remote: Remote, may_change: list[Any]) -> APIRouter:
    router = APIRouter(tags=["settings"])

    @router.get("/v1/settings")
    def settings() -> dict[str, Any]:
        """Return all settings in effect; secrets are hidden."""
        return dict(remote.settings())

    @router.patch(
        "/v1/settings",
        dependencies=may_change,
        responses=_OF_CHANGES,
        description=f"Change settings, all of them or none. Those that may change are {_NAMES}; null is the default.",
    )
    def change_settings(changes: _Changes) -> dict[str, Any]:
        return dict(remote.change_settings(changes))

    return router


def _of_faults(remote: Remote, may_change: list[Any]) -> APIRouter:
    router = APIRouter(tags=["faults"])

    def states() -> list[FaultState]:
        return [FaultState(rule=rule, struck=remote.injector.struck(rule.name)) for rule in remote.injector.rules]

    @router.get("/v1/faults", response_model_exclude_none=True)
    def faults() -> list[FaultState]:
        """Return the rules of faults, and how often each has struck."""
        return states()

    @router.post("/v1/faults", dependencies=may_change, responses=_OF_CHANGES, response_model_exclude_none=True)
    def put_fault(rule: Rule) -> list[FaultState]:
        """Add a rule, or replace the one of its name, from the next request on."""
        remote.put_fault(rule)
        return states()

    @router.delete("/v1/faults", dependencies=may_change, responses=_OF_CHANGES)
    def remove_all() -> list[FaultState]:
        """Remove all rules, and end what they have begun."""
        for rule in remote.injector.rules:
            remote.injector.remove(rule.name)
        return states()

    @router.delete(
        "/v1/faults/{name}",
        dependencies=may_change,
        responses=_OF_CHANGES | _UNKNOWN,
        response_model_exclude_none=True,
    )
    def remove_fault(name: RuleName) -> list[FaultState]:
        """Remove a rule, and end what it has begun."""
        remote.remove_fault(name)
        return states()

    @router.post(
        "/v1/faults/{name}/fire",
        dependencies=may_change,
        responses=_OF_CHANGES | _UNKNOWN,
        status_code=HTTPStatus.ACCEPTED,
        response_model_exclude_none=True,
    )
    def fire_fault(name: RuleName, after_answer: BackgroundTasks) -> list[FaultState]:
        """Let a rule strike whatever its conditions: the engine at once, a request, a call or a join the next one."""
        if remote.ends_process(name):
            after_answer.add_task(remote.fire_fault, name)
        else:
            remote.fire_fault(name)
        return states()

    return router


def _of_engines(remote: Remote, may_change: list[Any]) -> APIRouter:
    router = APIRouter(tags=["engines"])

    @router.get("/v1/engines", responses=_STUCK)
    def engines() -> list[EngineState]:
        """Return the ranks of this process while they serve a frontend."""
        return remote.engines()

    @router.get("/v1/requests", responses=_STUCK)
    def requests() -> list[RequestState]:
        """Return the requests in flight, without what they say."""
        return remote.requests()

    @router.post("/v1/engines/{rank}/drain", dependencies=may_change, responses=_OF_CHANGES | _UNKNOWN)
    def drain(rank: Rank) -> EngineState:
        """Refuse new requests, such that they may be sent elsewhere (503 with 0.33); those that run go on."""
        return remote.drain(rank, begins=True)

    @router.post("/v1/engines/{rank}/rejoin", dependencies=may_change, responses=_OF_CHANGES | _UNKNOWN)
    def rejoin(rank: Rank) -> EngineState:
        """Take requests again."""
        return remote.drain(rank, begins=False)

    @router.post(
        "/v1/engines/{rank}/crash",
        dependencies=may_change,
        responses=_OF_CHANGES | _UNKNOWN,
        status_code=HTTPStatus.ACCEPTED,
    )
    def crash(rank: Rank, after_answer: BackgroundTasks, order: CrashOrder | None = None) -> Mapping[str, int]:
        """End the process that plays a rank, with all its ranks, as soon as this is answered."""
        order = order or CrashOrder()
        remote.check_rank(rank)
        after_answer.add_task(remote.crash, rank, notice=order.notice, exit_code=order.exit_code)
        return {"engine": rank, "exit_code": order.exit_code}

    return router


# What is answered to what cannot be done. Starlette looks handlers up by their exception, which it hands over as any.


def _not_valid(_request: Request, error: Exception) -> JSONResponse:
    problems = []
    for each in error.errors() if isinstance(error, RequestValidationError) else ():
        place = ".".join(str(part) for part in each["loc"] if part != "body")
        problems.append(f"{place or 'body'}: {each['msg'].removeprefix('Value error, ')}")
    return JSONResponse({"detail": problems}, HTTPStatus.UNPROCESSABLE_ENTITY)


def _refused(_request: Request, error: Exception) -> JSONResponse:
    problems = list(error.problems) if isinstance(error, RefusedError) else [str(error)]
    return JSONResponse({"detail": problems}, HTTPStatus.UNPROCESSABLE_ENTITY)


def _unknown(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, HTTPStatus.NOT_FOUND)


def _stuck(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)
