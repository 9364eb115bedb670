"""The dashboard's routes; every page is also served as JSON at the same address + ".json"."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BeforeValidator, FiniteFloat
from starlette.exceptions import HTTPException as Refusal
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect

from rlx_registry import (
    AmbiguousNameError,
    NotFoundError,
    Registry,
    RegistryDatabaseError,
    RolloutQuery,
)
from rlx_web.access import HEADERS, Access, AccessGuard
from rlx_web.pages.credit import build_credit_page
from rlx_web.pages.files import build_log_page, open_download, read_chunks
from rlx_web.pages.rollouts import build_rollouts_page, nearest_step
from rlx_web.pages.run import FindLink, build_run_page, live_run
from rlx_web.pages.runs import build_run_list_page, live_runs
from rlx_web.text import templates

HERE = Path(__file__).parent
LARGEST_NUMBER = 2**31 - 1
"""The largest step or row number that a registry can store."""
FORM_BYTES = 4096
"""Maximum size of a form in bytes."""

Text = Annotated[str, Query(max_length=200)]
Name = Annotated[str, Query(max_length=2000)]
Page = Annotated[int, Query(ge=1, le=100_000)]
Step = Annotated[int, Query(ge=0, le=LARGEST_NUMBER)]
Place = Annotated[int, PathParameter(ge=0, le=LARGEST_NUMBER)]
Bound = Annotated[FiniteFloat | None, BeforeValidator(lambda text: text.strip() or None)]
Offset = Annotated[int, Query(ge=0, le=2**53)]
View = Callable[..., dict[str, Any]]


router = APIRouter()


def create_app(registry_url: str, access: Access, find_link: FindLink = lambda _: None) -> FastAPI:
    """The dashboard application of one registry. Every request opens the database for reading, so
    it may be created or moved while the dashboard runs; while it cannot be read, pages explain why
    with status 503."""
    app = FastAPI(title="rlx", docs_url=None, redoc_url=None, version="1")
    app.state.registry_url, app.state.access, app.state.find_link = registry_url, access, find_link
    app.mount("/static", StaticFiles(directory=HERE / "static"))
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)
    app.add_middleware(AccessGuard, access=access, headers=HEADERS)
    app.include_router(router)
    for error in (RegistryDatabaseError, Refusal, RequestValidationError):
        app.add_exception_handler(error, _render_error)
    return app


def _open_request_registry(request: Request) -> Iterator[Registry]:
    with Registry.open(request.app.state.registry_url, read_only=True) as opened:
        yield opened


Opened = Annotated[Registry, Depends(_open_request_registry)]


def _page(path: str, template: str) -> Callable[[View], View]:
    """Serves what a function returns as a page, and as JSON at the same address + ".json"."""

    def add_view(view: View) -> View:
        def serve_json(data: Annotated[dict[str, Any], Depends(view)]) -> Response:
            return _build_json_response(data)

        def serve_page(
            request: Request, data: Annotated[dict[str, Any], Depends(view)]
        ) -> Response:
            context = {**data, "write": request.app.state.access.write}
            return templates.TemplateResponse(request, template, context)

        name = view.__name__.strip("_")
        router.add_api_route(
            f"{path}.json", serve_json, response_class=JSONResponse, name=f"{name}_json"
        )
        router.add_api_route(path, serve_page, response_class=HTMLResponse, name=name)
        router.add_api_route(path, serve_page, methods=["HEAD"], include_in_schema=False)
        return view

    return add_view


@_page("/", "runs.html")
def _serve_run_list(registry: Opened, q: Text = "", page: Page = 1) -> dict[str, Any]:
    return build_run_list_page(registry, q, page)


@_page("/runs/{ref}/rollouts/{step}/{row}", "credit.html")
def _serve_credit(
    registry: Opened,
    ref: str,
    step: Place,
    row: Place,
    tokens: Annotated[str, Query(pattern="^([0-9]{1,9}-[0-9]{1,9})?$")] = "",
) -> dict[str, Any]:
    first, _, last = tokens.partition("-")
    return build_credit_page(registry, ref, step, row, (int(first), int(last)) if tokens else None)


def _parse_rollout_query(
    low: Bound = None,
    high: Bound = None,
    turn: Text = "",
    failed: bool = False,
    no_signal: bool = False,
    text: Text = "",
    problem: Name = "",
) -> RolloutQuery:
    """Empty fields of the form do not filter."""
    return RolloutQuery(
        low=low,
        high=high,
        turn=turn or None,
        failed=failed,
        no_signal=no_signal,
        text=text or None,
        problem=problem or None,
    )


@_page("/runs/{ref}/rollouts/{step}", "rollouts.html")
def _serve_rollouts(
    registry: Opened,
    ref: str,
    step: Place,
    query: Annotated[RolloutQuery, Depends(_parse_rollout_query)],
    page: Page = 1,
) -> dict[str, Any]:
    return build_rollouts_page(registry, ref, step, query, page)


@_page("/runs/{ref}/log", "log.html")
def _serve_log(registry: Opened, ref: str, after: Offset | None = None) -> dict[str, Any]:
    return build_log_page(registry, ref, after)


@_page("/runs/{ref}", "run.html")
def _serve_run(request: Request, registry: Opened, ref: str) -> dict[str, Any]:
    return build_run_page(registry, ref, request.app.state.find_link)


@router.get("/live.json", response_class=JSONResponse)
def _serve_live_runs(registry: Opened) -> Response:
    return _build_json_response(live_runs(registry))


@router.get("/runs/{ref}/live.json", response_class=JSONResponse)
def _serve_live_run(
    registry: Opened,
    ref: str,
    after: Offset = 0,
    event: Annotated[int, Query(ge=0, le=LARGEST_NUMBER)] = 0,
) -> Response:
    return _build_json_response(live_run(registry, ref, after, event))


@router.get("/runs/{ref}/curves.json", response_class=JSONResponse)
def _serve_curves(
    registry: Opened,
    ref: str,
    name: Annotated[list[Name], Query(max_length=100)] = [],  # noqa: B006
) -> Response:
    run = registry.run(ref).id
    return _build_json_response({"run": run, "curves": registry.queries.curves(run, name)})


@router.get("/runs/{ref}/files/{path:path}", response_class=StreamingResponse)
def _serve_file(registry: Opened, ref: str, path: str) -> Response:
    file = open_download(registry, ref, path)
    name = quote(path.rpartition("/")[2], safe="", errors="replace")
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
    kind = "application/octet-stream"
    return StreamingResponse(read_chunks(file), headers=headers, media_type=kind)


@router.get("/runs/{ref}/rollouts", response_class=RedirectResponse, status_code=303)
def _serve_nearest_step(registry: Opened, ref: str, step: Step = LARGEST_NUMBER) -> Response:
    at = nearest_step(registry, ref, step)
    return RedirectResponse(f"/runs/{registry.run(ref).id}/rollouts/{at}", 303)


async def _check_form(request: Request) -> None:
    content = b""
    try:
        async for part in request.stream():
            content += part
            if len(content) > FORM_BYTES:
                raise HTTPException(413, "the form is too large")
    except ClientDisconnect as error:  # nobody reads the response, but the log stays clean
        raise HTTPException(400, "the form is incomplete") from error
    secret = parse_qs(content.decode("ascii", "replace")).get("write", [""])[0]
    request.app.state.access.require_write(secret)


@router.post("/runs/{ref}/stop", dependencies=[Depends(_check_form)], status_code=303)
def _stop_run(request: Request, ref: str) -> Response:
    with Registry.open(request.app.state.registry_url, create=False) as registry:
        record = registry.run(ref)
        lost = record.effective_status == "lost"
        if lost or not registry.leave_request(record.id, "stop"):
            raise HTTPException(409, f"{record.id} is {record.effective_status}, not running")
    return RedirectResponse(f"/runs/{record.id}", 303)


def _build_json_response(data: dict[str, Any], status: int = 200) -> Response:
    # ASCII, because lone surrogates, which a model can write, cannot be encoded in UTF-8.
    try:
        text = json.dumps(data, allow_nan=False)
    except ValueError:
        text = json.dumps(_spell_non_finite(data), allow_nan=False)
    return Response(text, status, media_type="application/json")


def _spell_non_finite(data: Any) -> Any:
    """Replaces non-finite numbers by the strings "nan", "inf" and "-inf"."""
    if isinstance(data, dict):
        return {name: _spell_non_finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_spell_non_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


async def _render_error(request: Request, error: Exception) -> Response:
    """Renders an error as a page or as JSON, depending on the requested address."""
    status, message = 503, str(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        status, message = 422, f"{where}: {first['msg']}"
    elif isinstance(error, Refusal):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, NotFoundError | AmbiguousNameError):
        status = 404
    data = {"error": {"status": status, "message": message}}
    headers = getattr(error, "headers", None)
    if request.url.path.endswith(".json"):
        response = _build_json_response(data, status)
    else:
        response = templates.TemplateResponse(request, "error.html", data, status_code=status)
    response.headers.update(headers or {})
    return response
