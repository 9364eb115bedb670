"""Access control and security headers.

A local address alone is not trusted. A page on another site can make a browser send requests to
this server, so the guard checks `Host`, and write requests need a secret that only our own pages
contain. Pages show model output, so the headers forbid inline scripts and external resources.
"""

import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import urlencode

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.responses import PlainTextResponse, RedirectResponse

__all__ = ["LOOPBACK", "Access", "add_access_guard"]

LOOPBACK = ("localhost", "127.0.0.1", "::1")
COOKIE = "rlx_token"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Next = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Access:
    """Which requests a dashboard accepts.

    Attributes:
        hosts: accepted host names, without ports.
        token: token required for reading; None if only this machine can connect.
        write: secret in our own forms, required for writing; different in every process.
    """

    hosts: Collection[str] = LOOPBACK
    token: str | None = None
    write: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def accepts_host(self, host: str) -> bool:
        """Whether a `Host` header names this dashboard."""
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/?#\[\]]+))(?::\d{1,5})?", host)
        return found is not None and (found[1] or found[2]).lower() in self.hosts

    def can_read(self, request: Request) -> bool:
        """Whether a request has the token, as a bearer token or in an earlier visit's cookie."""
        if self.token is None:
            return True
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        tokens = [
            bearer if kind.lower() == "bearer" else "",
            request.cookies.get(_format_cookie_name(request), ""),
        ]
        return any(_is_same_token(one, self.token) for one in tokens)

    def require_write(self, secret: str) -> None:
        """Checks that a form contains our secret.

        Raises:
            HTTPException: it does not; status 403.
        """
        if not _is_same_token(secret, self.write):
            raise HTTPException(403, "this form is not of this dashboard: load the page again")


def _is_same_token(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


def _format_cookie_name(request: Request) -> str:
    """One cookie per port, because all dashboards of a host share its cookies."""
    return f"{COOKIE}_{request.url.port or 80}"


def _strip_token(request: Request) -> str:
    """The path and query of a request without the token."""
    rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
    return f"/{request.url.path.lstrip('/')}" + (f"?{urlencode(rest)}" if rest else "")


def add_access_guard(app: FastAPI, access: Access) -> None:
    """Adds the access checks and the security headers to every response of an application."""

    @app.middleware("http")
    async def guard_request(request: Request, call_next: Next) -> Response:
        response = await _answer_request(request, call_next, access)
        response.headers.update(HEADERS)
        return response


async def _answer_request(request: Request, call_next: Next, access: Access) -> Response:
    if not access.accepts_host(request.headers.get("host", "")):
        return PlainTextResponse("this is not a name of this dashboard", 400)
    token = request.query_params.get("token")
    if access.token is not None and token is not None and request.method == "GET":
        if not _is_same_token(token, access.token):
            return PlainTextResponse("wrong token", 401)
        redirect = RedirectResponse(_strip_token(request), 303)
        redirect.set_cookie(
            _format_cookie_name(request), access.token, httponly=True, samesite="strict", path="/"
        )
        return redirect
    if not access.can_read(request):
        message = "this dashboard needs its token: open /?token=..., or send it as a bearer token"
        return PlainTextResponse(message, 401, {"WWW-Authenticate": "Bearer"})
    return await call_next(request)
