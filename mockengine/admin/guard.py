# SPDX-License-Identifier: Apache-2.0
"""Who may change something over HTTP, and how large what they send may be.

A token, where there is one, is all that is asked. Without one, only this machine may, which a browser takes every page
in it for: so a request of another page's is refused, and one by another name than the machine's own.
"""

import hmac
import ipaddress
from collections.abc import Callable
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mockengine.settings import Settings

MOST_BODY_BYTES: Final = 2**20


def make_guard(settings: Callable[[], Settings]) -> Callable[[Request], None]:
    """Return what raises an `HTTPException` unless a request may change something."""

    def guard(request: Request) -> None:
        now = settings()
        if now.admin_token is not None:
            _check_token(request, now.admin_token.get_secret_value())
        elif not now.admin_insecure:
            _check_place(request, now.admin_host)

    return guard


def _check_token(request: Request, token: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED,
            "changes take the engine's admin_token (send Authorization: Bearer SECRET)",
            {"WWW-Authenticate": "Bearer"},
        )


def _check_place(request: Request, admin_host: str) -> None:
    if not is_loopback(admin_host):
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            f"admin_host is {admin_host}, which others reach too, and there is no admin_token: nothing can be changed "
            "(set admin_token, or admin_insecure where everybody may)",
        )
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    if not is_loopback(host):
        raise HTTPException(HTTPStatus.FORBIDDEN, f"{host!r} is no name of this machine for itself (use 127.0.0.1)")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HTTPException(HTTPStatus.FORBIDDEN, f"a page of {origin} must not change anything here")


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address of that name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BodyLimit:
    """Refuses what is larger than `MOST_BODY_BYTES`, without reading it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, as far as it is small."""
        received = 0

        async def receive_some() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MOST_BODY_BYTES:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body of more than {MOST_BODY_BYTES} bytes is not taken"
                )
            return message

        await self._app(scope, receive_some if scope["type"] == "http" else receive, send)
