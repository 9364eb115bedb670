"""The address that the programs of agents ask for their turns, in a thread of its own."""

import json
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from functools import cache
from threading import Condition, Thread
from typing import Any, Self

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlx.agents.requests import AgentRequests, Continuation
from rlx.rollout import RecordedTurn, RolloutOverError, TurnRequest
from rlx.serving import (
    ChatAnswer,
    ChatRequest,
    ClientGoneError,
    InvalidRequestError,
    Outcome,
    TextAnswer,
    TextRequest,
    build_app,
    build_fault,
    list_models,
    send_answer,
    wait_for_outcome,
)

LONGEST_BODY = 16 << 20
"""Bytes of a request's body."""
OVER = "rollout_over"
"""OpenAI's code of the error where a rollout has no further turns."""


class TurnOutcome(Outcome[list[RecordedTurn]]):
    """What becomes of a request for turns."""

    def __init__(self, queue: "TurnQueue", agent: AgentRequests, request: TurnRequest) -> None:
        super().__init__()
        self.agent, self.request = agent, request
        self._queue = queue

    def abandon(self) -> None:
        """Takes the request from the queue, or has what is sampled for it thrown away."""
        with self._queue.changed:
            if self.done():
                return
            super().abandon()
            if self in self._queue.waiting:
                self._queue.waiting.remove(self)
                self.agent.recorder.withdraw(self.request)
            self._queue.changed.notify()

    def forget(self) -> None:
        with self._queue.changed:
            self.agent.recorder.forget(self.request)


class TurnQueue:
    """The requests that wait for turns, in the order in which they came, and the agents that may
    make some, by their keys. Everything is used under the lock of `changed`."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.agents: dict[str, AgentRequests] = {}
        self.waiting: list[TurnOutcome] = []

    def add_agent(self, agent: AgentRequests) -> str:
        """Lets an agent make requests; returns its key, which nobody can guess."""
        key = secrets.token_urlsafe(24)
        with self.changed:
            self.agents[key] = agent
        return key

    def submit(
        self,
        agent: AgentRequests,
        request: ChatRequest | TextRequest,
        continued: Continuation,
        *,
        is_repeated: bool,
    ) -> Outcome[list[RecordedTurn]]:
        """Queues a request; if the client says that it has lost the connection (`is_repeated`),
        turns that it may have lost are given again.
        """
        for text in agent.list_ignored(request):
            _say_once(f"an agent asks for {text}, which counts")
        if is_repeated:
            found = agent.recorder.find_repeated(continued.after, continued.prompt, request.choices)
            if found is not None:
                again: Outcome[list[RecordedTurn]] = Outcome()
                again.set_result(found)
                return again
        try:
            wanted = agent.ask(request, continued)
        except RolloutOverError as error:
            agent.is_over = True
            self.changed.notify()
            raise InvalidRequestError(str(error), None, code=OVER) from error
        outcome = TurnOutcome(self, agent, wanted)
        self.waiting.append(outcome)
        self.changed.notify()
        return outcome


@cache
def _say_once(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")


def create_agent_app(queue: TurnQueue) -> FastAPI:
    """Returns the application that answers agents, each below `/r/KEY`."""
    app = build_app()
    app.add_middleware(_AgentGuard, queue=queue)

    @app.get("/r/{key}/v1/models")
    def _list_models(key: str) -> Response:
        return JSONResponse(list_models(queue.agents[key].model))

    @app.post("/r/{key}/v1/chat/completions")
    async def _chat(key: str, body: ChatRequest, request: Request) -> Response:
        agent = queue.agents[key]
        return await _sample(queue, agent, body, request, agent.read_chat, agent.answer_chat)

    @app.post("/r/{key}/v1/completions")
    async def _complete(key: str, body: TextRequest, request: Request) -> Response:
        agent = queue.agents[key]
        return await _sample(queue, agent, body, request, agent.read_text, agent.answer_text)

    @app.post("/r/{key}/v1/info")
    async def _report(key: str, request: Request) -> Response:
        agent = queue.agents[key]
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the body is not JSON: {error}", None) from error
        with queue.changed:
            _refuse(agent, lambda: agent.report(body))
        return Response(status_code=204)

    return app


async def _sample(
    queue: TurnQueue,
    agent: AgentRequests,
    body: ChatRequest | TextRequest,
    request: Request,
    read: Callable[[Any], Continuation],
    answer: Callable[[Any, Sequence[RecordedTurn]], ChatAnswer | TextAnswer],
) -> Response:
    """Waits for turns as long as the client does; forgets those that it has not waited for."""
    is_repeated = request.headers.get("x-stainless-retry-count", "0") != "0"  # of OpenAI's client
    with queue.changed:
        outcome = _refuse(
            agent, lambda: queue.submit(agent, body, read(body), is_repeated=is_repeated)
        )
    turns = await wait_for_outcome(outcome, request)
    if isinstance(outcome, TurnOutcome) and await request.is_disconnected():
        outcome.forget()
        raise ClientGoneError
    with queue.changed:
        answered = answer(body, turns)
    return send_answer(body, answered)


def _refuse(agent: AgentRequests, answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except InvalidRequestError:
        agent.refused += 1
        raise


class _TooLongError(Exception):
    """A body has more bytes than a request may have."""


class _AgentGuard:
    """Passes on the requests of agents that are there, before their bodies are read."""

    def __init__(self, app: ASGIApp, queue: TurnQueue) -> None:
        self._app, self._queue = app, queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts: list[str] = scope["path"].split("/")
        key = parts[2] if len(parts) > 2 else ""
        if key not in self._queue.agents:
            await build_fault(404, "there is no rollout at this address")(scope, receive, send)
            return
        left = LONGEST_BODY

        async def receive_bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _TooLongError
            return message

        length = Headers(scope=scope).get("content-length", "0")
        try:
            if not length.isdigit() or int(length) > LONGEST_BODY:
                raise _TooLongError
            await self._app(scope, receive_bounded, send)
        except _TooLongError:
            refusal = build_fault(413, f"a request has at most {LONGEST_BODY} bytes")
            await refusal(scope, receive, send)


class AgentEndpoint:
    """Answers agents on a port of this machine's loopback address; a context manager."""

    def __init__(self, queue: TurnQueue) -> None:
        self._queue = queue

    def __enter__(self) -> Self:
        import uvicorn

        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(2048)
        config = uvicorn.Config(
            create_agent_app(self._queue), log_level="warning", lifespan="off", server_header=False,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = Thread(
            target=self._server.run, args=([self._socket],), name="rlx-endpoint", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def locate(self, key: str) -> str:
        """Base URL of the agent with a key."""
        host, port = self._socket.getsockname()
        return f"http://{host}:{port}/r/{key}/v1"
