"""Routes, and what guards them: loopback names only, GET only, a strict content policy."""

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rlx_registry import Ambiguous, NotFound, Registry, RegistryError
from rlx_web import pages
from rlx_web.text import templates

__all__ = ["create_app"]

HERE = Path(__file__).parent

# A page on another site can make a browser ask us under a name of its own; it is refused by name.
LOOPBACK = ["localhost", "127.0.0.1", "::1", "[::1]"]

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(registry_url: str) -> FastAPI:
    """Returns the dashboard of one registry, which need not exist yet.

    The database is opened for reading anew by every request, so it may be made, upgraded or moved
    under a running dashboard; while it cannot be read, pages say why with status 503.
    """
    app = FastAPI(title="rlx", openapi_url=None, docs_url=None, redoc_url=None)
    app.mount("/static", StaticFiles(directory=HERE / "static"))
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK, www_redirect=False)

    @app.middleware("http")
    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    def registry() -> Iterator[Registry]:
        with Registry.open(registry_url, read_only=True) as opened:
            yield opened

    _add_pages(app, Annotated[Registry, Depends(registry)])
    app.add_exception_handler(RegistryError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    return app


def _add_pages(app: FastAPI, registry: Any) -> None:
    def both(path: str, template: str) -> Callable[[Callable[..., dict[str, Any]]], None]:
        """Serves what a function returns as a page, and as JSON at the same path + ".json"."""

        def add(view: Callable[..., dict[str, Any]]) -> None:
            def twin(data: Annotated[dict[str, Any], Depends(view)]) -> Response:
                return _json(data)

            def page(request: Request, data: Annotated[dict[str, Any], Depends(view)]) -> Response:
                return templates.TemplateResponse(request, template, data)

            app.add_api_route(f"{path}.json", twin, response_model=None)
            app.add_api_route(path, page, response_model=None)

        return add

    @both("/", "runs.html")
    def _runs(opened: registry) -> dict[str, Any]:
        return pages.runs(opened)

    @both("/runs/{ref}/rollouts/{step:int}", "rollouts.html")
    def _rollouts(opened: registry, ref: str, step: int) -> dict[str, Any]:
        return pages.rollouts(opened, ref, step)

    @both("/runs/{ref}", "run.html")
    def _run(opened: registry, ref: str) -> dict[str, Any]:
        return pages.run(opened, ref)


def _json(data: dict[str, Any], status: int = 200) -> Response:
    # ASCII: lone surrogates, which a model can write, have no encoding of their own.
    return Response(json.dumps(data, allow_nan=False), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    """Says what is wrong, as a page or as JSON, whichever was asked for."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    else:
        status, message = 404 if isinstance(error, NotFound | Ambiguous) else 503, str(error)
    data = {"error": {"status": status, "message": message}}
    if request.url.path.endswith(".json"):
        return _json(data, status)
    return templates.TemplateResponse(request, "error.html", data, status_code=status)
