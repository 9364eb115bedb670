"""The HTTP side of a served model: routes, access, and OpenAI's form of errors."""

import asyncio
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from rlx.errors import RlxError, SpecError
from rlx.serving.batcher import JobOutcome, Outcome, QueueFullError, SamplingJob
from rlx.serving.protocol import ChatRequest, SamplingRequest, TextRequest
from rlx.serving.responses import ChatAnswer, TextAnswer, list_models
from rlx.serving.served_model import InvalidRequestError, ServedModel

_field = re.compile(r"[A-Za-z_]+|\d+")
CLIENT_GONE = 499
"""Status of a response that nobody reads."""
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
NO_TOKEN = "the request has no valid token: send the header 'Authorization: Bearer TOKEN'"

Submit = Callable[[SamplingJob], JobOutcome]
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before it had a response."""


def create_app(model: ServedModel, submit: Submit, token: str | None) -> FastAPI:
    """Returns the application that serves a model by `Batcher.submit`.

    Every request needs the token; None lets everyone in who can connect to this machine's loopback
    address, but no web page.
    """
    app = build_app()
    app.add_middleware(_AccessGuard, token=token)
    models = list_models(model, int(time.time()))

    @app.get("/v1/models")
    def _list_models() -> Response:
        return JSONResponse(models)

    @app.get("/v1/models/{name:path}")
    def _show_model(name: str) -> Response:
        _require_model(model, name)
        return JSONResponse(models["data"][0])

    @app.post("/v1/completions")
    async def _complete(body: TextRequest, request: Request) -> Response:
        _require_model(model, body.model)
        prompts = [model.encode_prompt(prompt) for prompt in body.prompts]
        job = model.build_job(body, [prompt.token_ids for prompt in prompts])
        groups = await wait_for_outcome(submit(job), request)
        return send_answer(body, TextAnswer(model, body, groups, prompts))

    @app.post("/v1/chat/completions")
    async def _chat(body: ChatRequest, request: Request) -> Response:
        _require_model(model, body.model)
        job = model.build_job(body, [model.encode_messages(body)])
        groups = await wait_for_outcome(submit(job), request)
        return send_answer(body, ChatAnswer(model, body, groups))

    return app


def build_app() -> FastAPI:
    """An application without routes that answers errors in OpenAI's form."""
    app = FastAPI(title="rlx", docs_url=None, redoc_url=None, openapi_url=None)
    expected = (InvalidRequestError, QueueFullError, ClientGoneError, RequestValidationError)
    for error in (*expected, HTTPException, Exception):
        app.add_exception_handler(error, _answer_error)
    return app


def _require_model(model: ServedModel, name: str) -> None:
    if name != model.name and name not in model.aliases:
        message = f"there is no model {name!r} here, but {model.name!r}"
        raise InvalidRequestError(message, "model", 404, "model_not_found")


async def wait_for_outcome(outcome: Outcome[T], request: Request) -> T:
    """Waits for what was sampled, as long as the client does."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    sampled = asyncio.wrap_future(outcome)
    leaving = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((sampled, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not sampled.done():
            raise ClientGoneError
        return sampled.result()
    finally:
        leaving.cancel()
        outcome.abandon()  # without effect if it is done
        sampled.cancel()


def send_answer(body: SamplingRequest, answer: TextAnswer | ChatAnswer) -> Response:
    if not body.stream:
        return JSONResponse(answer.build_response())
    written = map(json.dumps, answer.iterate_chunks())
    events = (f"data: {event}\n\n" for event in (*written, "[DONE]"))
    return StreamingResponse(events, media_type="text/event-stream")


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, InvalidRequestError):
        return build_fault(error.status, str(error), error.param, error.code)
    if isinstance(error, ClientGoneError):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, QueueFullError):
        response = build_fault(429, str(error), None, "rate_limit_exceeded")
        response.headers["Retry-After"] = "1"
        return response
    if isinstance(error, RequestValidationError):
        return build_fault(400, *_describe_fault(error))
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        return build_fault(error.status_code, message)
    if isinstance(error, SpecError):  # the engine cannot do what is asked for
        return build_fault(400, str(error))
    known = isinstance(error, RlxError)
    message = str(error) if known else f"{type(error).__name__}; the server's log says more"
    return build_fault(500, message)


def _describe_fault(error: RequestValidationError) -> tuple[str, str | None]:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}", None
    # Without the names of the types that pydantic tried.
    where = [p for p in first["loc"][1:] if p != "str" and _field.fullmatch(str(p))]
    param = ".".join(map(str, where)) or None
    if first["type"] == "extra_forbidden":
        return f"unrecognized request argument: {param}", param
    message = first["msg"].removeprefix("Value error, ")
    if param is None and (named := re.match(r"(\w+): ", message)):
        return message, named[1]
    return (f"{param}: {message}" if param else message), param


def build_fault(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> JSONResponse:
    kinds = {429: "rate_limit_error", 401: "authentication_error", 403: "permission_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    fault = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": fault}, status)


class _AccessGuard:
    """Passes on the requests that may be served, before their bodies are read."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http":
            refusal = find_refusal(Headers(scope=scope), self._token)
        await (refusal or self._app)(scope, receive, send)


def find_refusal(headers: Mapping[str, str], token: str | None) -> Response | None:
    """The refusal of a request by its headers, or None. Without a token it must name this machine's
    loopback address and come from no web page, which can make a browser send requests here."""
    if token is None:
        if LOCAL_HOST.fullmatch(headers.get("host", "")) and "origin" not in headers:
            return None
        return build_fault(403, "without a token, only programs on this machine are served")
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(bearer.strip().encode("utf-8", "replace"), token.encode())
    if kind.lower() == "bearer" and same:
        return None
    refusal = build_fault(401, NO_TOKEN, None, "invalid_api_key")
    refusal.headers["WWW-Authenticate"] = "Bearer"
    return refusal
