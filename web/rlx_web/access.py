"""Access control and security headers.

A local address alone is not trusted. Other users of the machine can connect to it, so every request
needs the token. A page on another site can make a browser send requests to this server, so the
guard checks `Host` and `Origin`, and write requests need a secret that only our own pages contain:
browsers send the cookie to every port of a host. Pages show model output, so the headers forbid
inline scripts and external resources.
"""

import hmac
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from fastapi import HTTPException
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
"""For every response of the dashboard."""
NEEDS_TOKEN = """\
This server needs its token, and the request has none or a wrong one.

rlx web, which started the server, printed its address with the token or took the token from
RLX_WEB_TOKEN. Open http://HOST:PORT/?token=TOKEN once in this browser, or send the header
"Authorization: Bearer TOKEN". A server that is started again has a new token.
"""


@dataclass(frozen=True, slots=True)
class Access:
    """Which requests a server accepts.

    Attributes:
        token: None lets everyone in who can connect.
        hosts: accepted host names, without ports.
        write: secret in our own forms, required for writing.
    """

    token: str | None
    hosts: Collection[str] = LOOPBACK
    write: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def accepts_host(self, host: str) -> bool:
        """Whether a `Host` header names this server."""
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/?#\[\]]+))(?::\d{1,5})?", host)
        return found is not None and (found[1] or found[2]).lower() in self.hosts

    def has_token(self, request: HTTPConnection) -> bool:
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
        """Raises HTTPException 403 if a form lacks our secret."""
        if not _is_same_token(secret, self.write):
            raise HTTPException(403, "this form does not belong to this dashboard: reload the page")


class AccessGuard:
    """ASGI middleware that passes on what an `Access` accepts; all responses get the headers."""

    def __init__(
        self, app: ASGIApp, access: Access, headers: Mapping[str, str] | None = None
    ) -> None:
        self._app, self._access, self._headers = app, access, headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        response = _answer_instead(HTTPConnection(scope), self._access)
        if response is None:
            await self._app(scope, receive, send_with_headers)
        elif scope["type"] == "http":
            await response(scope, receive, send_with_headers)
        else:
            await send({"type": "websocket.close", "code": 1008})


def _answer_instead(request: HTTPConnection, access: Access) -> Response | None:
    """The refusal of a request, or the redirect that sets the cookie; None if it may pass."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin", "null")
    if not access.accepts_host(host):
        return PlainTextResponse("this is not a name of this server", 400)
    # Browsers say "null" for forms of pages without a referrer, as ours are.
    if origin != "null" and origin.partition("://")[2].lower() != host.lower():
        return PlainTextResponse("this request is from a page of another server", 403)
    token = request.query_params.get("token")
    if access.token is not None and token is not None and request.scope.get("method") == "GET":
        if not _is_same_token(token, access.token):
            return _refuse_token()
        rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
        address = f"/{request.url.path.lstrip('/')}" + (f"?{urlencode(rest)}" if rest else "")
        redirect = RedirectResponse(address, 303)
        redirect.set_cookie(
            _format_cookie_name(request), access.token, httponly=True, samesite="strict", path="/"
        )
        return redirect
    return None if access.has_token(request) else _refuse_token()


def _refuse_token() -> Response:
    return PlainTextResponse(NEEDS_TOKEN, 401, {"WWW-Authenticate": "Bearer"})


def _is_same_token(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


def _format_cookie_name(request: HTTPConnection) -> str:
    """One cookie per port, because all servers of a host share its cookies."""
    return f"{COOKIE}_{request.url.port or 80}"
