"""The dashboard's routes; every page is also served as JSON at the same address + ".json"."""

import json
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, quote

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException as Refusal
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect

from rlx_registry import (
    RESUMED_ON_DASHBOARD,
    AmbiguousNameError,
    NotFoundError,
    Registry,
    RegistryDatabaseError,
    RolloutQuery,
)
from rlx_web.access import HEADERS, Access, AccessGuard
from rlx_web.memo import Memo
from rlx_web.notes import NoteError, parse_note, parse_tags
from rlx_web.pages.columns import ColumnError
from rlx_web.pages.compare import build_comparison_page
from rlx_web.pages.credit import build_credit_page
from rlx_web.pages.files import build_log_page, open_download
from rlx_web.pages.rollouts import build_rollouts_page, nearest_step
from rlx_web.pages.run import (
    RESUMABLE,
    build_run_curves,
    build_run_page,
    is_job,
    live_run,
    run_sections,
)
from rlx_web.pages.runs import build_run_list_page, live_runs
from rlx_web.pages.system import build_system_page
from rlx_web.text import templates

__all__ = ["create_app"]

HERE = Path(__file__).parent
LONGEST = 2**31 - 1
"""The largest step or row number that a registry can store."""
BODY = 4096
"""Maximum size of a form in bytes."""
NOTE_BODY = 65536
"""Maximum size of the form of a note, whose characters take up to twelve bytes."""

Text = Annotated[str, Query(max_length=200)]
Name = Annotated[str, Query(max_length=2000)]
Page = Annotated[int, Query(ge=1, le=100_000)]
Step = Annotated[int, Query(ge=0, le=LONGEST)]
Offset = Annotated[int, Query(ge=0, le=2**53)]
View = Callable[..., dict[str, Any]]


class _Number(Convertor[int]):
    """Path parameter for a step or row number, limited to ten digits."""

    regex = "[0-9]{1,10}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("number", _Number())


def create_app(registry_url: str, access: Access) -> FastAPI:
    """Returns the dashboard application of one registry, which need not exist yet.

    Every request opens the database for reading, so it may be created, upgraded or moved while the
    dashboard runs. While it cannot be read, pages explain why with status 503. Only three forms
    write: they request a run to stop, requeue a run, and replace a run's note and tags.

    Args:
        access: accepted requests.
    """
    app = FastAPI(title="rlx", docs_url=None, redoc_url=None, version="1")
    app.mount("/static", StaticFiles(directory=HERE / "static"))
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)
    app.add_middleware(AccessGuard, access=access, headers=HEADERS)

    def open_request_registry() -> Iterator[Registry]:
        with Registry.open(registry_url, read_only=True) as opened:
            yield opened

    opened = Annotated[Registry, Depends(open_request_registry)]
    both = _PageAndJson(app, access)
    _add_lists(both, opened)
    _add_runs(both, opened)
    _add_polled_routes(app, opened)
    _add_requests(app, registry_url, access)
    for error in (RegistryDatabaseError, Refusal, RequestValidationError):
        app.add_exception_handler(error, _render_error)
    return app


class _PageAndJson:
    """Serves what a function returns as a page, and as JSON at the same address + ".json"."""

    def __init__(self, app: FastAPI, access: Access) -> None:
        self._app, self._write = app, access.write

    def __call__(self, path: str, template: str) -> Callable[[View], View]:
        def add_view(view: View) -> View:
            def serve_json(data: Annotated[dict[str, Any], Depends(view)]) -> Response:
                return _build_json_response(data)

            def serve_page(
                request: Request, data: Annotated[dict[str, Any], Depends(view)]
            ) -> Response:
                context = {**data, "write": self._write}
                return templates.TemplateResponse(request, template, context)

            name = view.__name__.strip("_")
            self._app.add_api_route(
                f"{path}.json", serve_json, response_class=JSONResponse, name=f"{name}_json"
            )
            self._app.add_api_route(path, serve_page, response_class=HTMLResponse, name=name)
            self._app.add_api_route(path, serve_page, methods=["HEAD"], include_in_schema=False)
            return view

        return add_view


def _add_lists(both: _PageAndJson, opened: Any) -> None:
    @both("/", "runs.html")
    def _serve_run_list(
        registry: opened,
        q: Text = "",
        page: Page = 1,
        column: Annotated[list[Text], Query(max_length=60)] = [],  # noqa: B006
    ) -> dict[str, Any]:
        try:
            return build_run_list_page(registry, q, page, [one for one in column if one])
        except ColumnError as error:
            raise HTTPException(422, str(error)) from error

    @both("/compare", "compare.html")
    def _serve_comparison(
        registry: opened,
        run: Annotated[list[Text], Query()] = [],  # noqa: B006
    ) -> dict[str, Any]:
        return build_comparison_page(registry, [ref for ref in run if ref])

    @both("/system", "system.html")
    def _serve_system(registry: opened) -> dict[str, Any]:
        return build_system_page(registry)


def _add_runs(both: _PageAndJson, opened: Any) -> None:
    @both("/runs/{ref}/rollouts/{step:number}/{row:number}", "credit.html")
    def _serve_credit(
        registry: opened,
        ref: str,
        step: int,
        row: int,
        tokens: Annotated[str, Query(pattern="^([0-9]{1,9}-[0-9]{1,9})?$")] = "",
    ) -> dict[str, Any]:
        _check_row_numbers(step, row)
        first, _, last = tokens.partition("-")
        return build_credit_page(
            registry, ref, step, row, (int(first), int(last)) if tokens else None
        )

    @both("/runs/{ref}/rollouts/{step:number}", "rollouts.html")
    def _serve_rollouts(
        registry: opened,
        ref: str,
        step: int,
        query: Annotated[RolloutQuery, Depends(_parse_rollout_query)],
        against: Annotated[str, Query(pattern="^[0-9]{0,9}$")] = "",
        beside: Text = "",
        page: Page = 1,
    ) -> dict[str, Any]:
        _check_row_numbers(step)
        other = int(against) if against else None
        return build_rollouts_page(registry, ref, step, query, other, page, beside)

    @both("/runs/{ref}/log", "log.html")
    def _serve_log(
        registry: opened, ref: str, before: Offset | None = None, after: Offset | None = None
    ) -> dict[str, Any]:
        return build_log_page(registry, ref, before, after)

    @both("/runs/{ref}", "run.html")
    def _serve_run(registry: opened, ref: str) -> dict[str, Any]:
        return build_run_page(registry, ref)


def _parse_rollout_query(
    low: Annotated[str, Query(max_length=40)] = "",
    high: Annotated[str, Query(max_length=40)] = "",
    turn: Text = "",
    failed: bool = False,
    no_signal: bool = False,
    text: Text = "",
    problem: Annotated[str, Query(max_length=2000)] = "",
) -> RolloutQuery:
    """Builds a query from the filter form; empty fields do not filter."""
    return RolloutQuery(
        low=_parse_number_field("low", low),
        high=_parse_number_field("high", high),
        turn=turn or None,
        failed=failed,
        no_signal=no_signal,
        text=text or None,
        problem=problem or None,
    )


def _parse_number_field(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        raise HTTPException(422, f"{name}: a reward must be a finite number")
    return value


def _check_row_numbers(*numbers: int) -> None:
    """Responds with 404 if a step or row number exceeds `LONGEST`."""
    if any(number > LONGEST for number in numbers):
        raise HTTPException(404, "there is no such step or row")


def _add_polled_routes(app: FastAPI, opened: Any) -> None:
    """Adds the routes that pages poll; clients share cached responses."""
    memo = Memo()

    @app.get("/live.json", response_class=JSONResponse)
    def _serve_live_runs(registry: opened) -> Response:
        return _wrap_json_text(memo("runs", lambda: _dump_json(live_runs(registry))))

    @app.get("/runs/{ref}/live.json", response_class=JSONResponse)
    def _serve_live_run(
        registry: opened,
        ref: str,
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        event: Annotated[int, Query(ge=0, le=LONGEST)] = 0,
    ) -> Response:
        return _wrap_json_text(
            memo((ref, after, event), lambda: _dump_json(live_run(registry, ref, after, event)))
        )

    @app.get("/runs/{ref}/sections.json", response_class=JSONResponse)
    def _serve_sections(registry: opened, ref: str) -> Response:
        return _build_json_response(run_sections(registry, ref))

    @app.get("/runs/{ref}/curves.json", response_class=JSONResponse)
    def _serve_curves(
        registry: opened,
        ref: str,
        name: Annotated[list[Name], Query(max_length=100)] = [],  # noqa: B006
        x: Literal["step", "tokens", "time"] = "step",
        smooth: bool = False,
    ) -> Response:
        key = (ref, x, smooth, *name)
        return _wrap_json_text(
            memo(key, lambda: _dump_json(build_run_curves(registry, ref, name, x, smooth)))
        )

    @app.get("/runs/{ref}/files/{path:path}", response_class=StreamingResponse)
    def _serve_file(registry: opened, ref: str, path: str) -> Response:
        file = open_download(registry, ref, path)
        name = quote(path.rpartition("/")[2], safe="", errors="replace")
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
        kind = "application/octet-stream"
        return StreamingResponse(file.read_chunks(), headers=headers, media_type=kind)

    @app.get("/runs/{ref}/rollouts", response_class=RedirectResponse, status_code=303)
    def _serve_nearest_step(registry: opened, ref: str, step: Step = LONGEST) -> Response:
        at = nearest_step(registry, ref, step)
        return RedirectResponse(f"/runs/{registry.run(ref).id}/rollouts/{at}", 303)


def _add_requests(app: FastAPI, url: str, access: Access) -> None:
    def _read_write_form(limit: int) -> Callable[[Request], Awaitable[dict[str, str]]]:
        async def read_form(request: Request) -> dict[str, str]:
            content = b""
            try:
                async for part in request.stream():
                    content += part
                    if len(content) > limit:
                        raise HTTPException(413, "the form is too large")
            except ClientDisconnect as error:  # nobody reads the response, but the log stays clean
                raise HTTPException(400, "the form is incomplete") from error
            fields = {n: v[0] for n, v in parse_qs(content.decode("ascii", "replace")).items()}
            access.require_write(fields.get("write", ""))
            return fields

        return read_form

    ours = [Depends(_read_write_form(BODY))]
    note_form = Depends(_read_write_form(NOTE_BODY))

    @app.post("/runs/{ref}/note", status_code=303)
    def _write_note(ref: str, form: Annotated[dict[str, str], note_form]) -> Response:
        """Replaces the run's note and tags."""
        try:
            note, tags = parse_note(form.get("note", "")), parse_tags(form.get("tags", ""))
        except NoteError as error:
            raise HTTPException(422, str(error)) from error
        with Registry.open(url, create=False) as registry:
            record = registry.run(ref)
            registry.notes.write(record.id, note, tags)
        return RedirectResponse(f"/runs/{record.id}", 303)

    @app.post("/runs/{ref}/stop", dependencies=ours, status_code=303)
    def _stop_run(ref: str) -> Response:
        """Requests the run's supervisor to write a checkpoint and stop."""
        with Registry.open(url, create=False) as registry:
            record = registry.run(ref)
            lost = record.effective_status == "lost"
            if lost or not registry.leave_request(record.id, "stop"):
                raise HTTPException(409, f"{record.id} is {record.effective_status}, not running")
        return RedirectResponse(f"/runs/{record.id}", 303)

    @app.post("/runs/{ref}/resume", dependencies=ours, status_code=303)
    def _requeue_run(ref: str) -> Response:
        """Queues the run, so that a worker resumes it from its newest checkpoint."""
        with Registry.open(url, create=False) as registry:
            record = registry.run(ref)
            status = record.effective_status
            if is_job(record):  # whose old job would decide its status
                raise HTTPException(409, f"{record.id} was a job: use rlx resume {record.id}")
            if status not in RESUMABLE or not registry.transition(
                record.id, {record.status}, "queued", RESUMED_ON_DASHBOARD
            ):
                raise HTTPException(409, f"{record.id} is {status}: it cannot be resumed")
        return RedirectResponse(f"/runs/{record.id}", 303)


def _build_json_response(data: dict[str, Any], status: int = 200) -> Response:
    return _wrap_json_text(_dump_json(data), status)


def _wrap_json_text(content: str, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")


def _dump_json(data: dict[str, Any]) -> str:
    # ASCII output, because lone surrogates, which a model can write, cannot be encoded in UTF-8.
    try:
        return json.dumps(data, allow_nan=False)
    except ValueError:
        return json.dumps(_spell_non_finite(data), allow_nan=False)


def _spell_non_finite(data: Any) -> Any:
    """Replaces non-finite numbers by the strings "nan", "inf" and "-inf"."""
    if isinstance(data, dict):
        return {name: _spell_non_finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_spell_non_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


async def _render_error(request: Request, error: Exception) -> Response:
    """Renders an error as a page or as JSON, depending on the requested address."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        status, message = 422, f"{where}: {first['msg']}"
    elif isinstance(error, Refusal):
        status, message = error.status_code, str(error.detail)
    else:
        status, message = (
            404 if isinstance(error, NotFoundError | AmbiguousNameError) else 503,
            str(error),
        )
    data = {"error": {"status": status, "message": message}}
    headers = getattr(error, "headers", None)
    if request.url.path.endswith(".json"):
        response = _build_json_response(data, status)
    else:
        response = templates.TemplateResponse(request, "error.html", data, status_code=status)
    response.headers.update(headers or {})
    return response
