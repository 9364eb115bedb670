"""An episode of an OpenEnv server: messages `reset`, `step` and `close` at its address `/ws`."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlsplit

from rlx_gyms.libraries import import_library
from rlx_gyms.remote import (
    LONGEST_MESSAGE,
    RemoteFault,
    RemoteReply,
    read_message,
    read_number,
)

__all__ = ["OpenEnvEpisode", "OpenEnvSession"]

_BUSY = "CAPACITY_REACHED"
_WAIT = 0.1
"""Seconds between two attempts to get a session."""

_FIELD_ERRORS = ("extra_forbidden", "missing")
"""Errors of pydantic that no text of a model causes: a field of the action has another name."""


@dataclass(frozen=True, slots=True)
class OpenEnvEpisode:
    """Which episodes a server plays, and how to read them.

    Attributes:
        url: where the server listens, such as `http://localhost:8000`.
        observation: field of its observations with the text; empty for all of them as JSON.
        seed: seed of the episode.
        reset: further arguments of its `reset`, as JSON.
    """

    url: str
    observation: str
    seed: int
    reset: str = "{}"


class OpenEnvSession:
    """A connection, which is a session of the server with an environment of its own."""

    def __init__(
        self,
        episode: OpenEnvEpisode,
        timeout: float,
        *,
        action: str = "message",
        rest: Mapping[str, Any] | None = None,
    ) -> None:
        self._episode, self._timeout = episode, timeout
        self._action, self._rest = action, dict(rest or {})
        self._opened = ExitStack()
        self._socket: Any = None

    def reset(self) -> RemoteReply:
        """Connects and begins the episode; waits while the server starts or has no free session.

        Raises:
            RemoteFault: the server cannot be reached, or does not begin the episode.
        """
        options = {**json.loads(self._episode.reset), "seed": self._episode.seed}
        end = time.monotonic() + self._timeout
        while True:
            try:
                self._connect(max(_WAIT, end - time.monotonic()))
                message = self._request("reset", options)
                if _get_code(message) != _BUSY:
                    return self._read_reply(message)
                fault = "has no free session"
            except OSError as error:
                fault = f"cannot be reached: {error}"
            self.close()
            if time.monotonic() + _WAIT > end:
                raise RemoteFault(f"{self._episode.url} {fault}")
            time.sleep(_WAIT)

    def step(self, text: str) -> RemoteReply:
        """Sends an action. One that the server's types refuse is an invalid turn.

        Raises:
            RemoteFault: the server fails, or its actions have no such field.
        """
        message = self._request("step", {**self._rest, self._action: text})
        if _get_code(message) == "VALIDATION_ERROR":
            self._check_fields(message)
            return RemoteReply(valid=False)
        return self._read_reply(message)

    def close(self) -> None:
        """Ends the server's session."""
        self._opened.close()

    def _connect(self, timeout: float) -> None:
        parts = urlsplit(self._episode.url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        url = parts._replace(scheme=scheme, path=f"{parts.path.rstrip('/')}/ws").geturl()
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        library = import_library("websockets")
        try:
            connection = import_library("websockets.sync.client").connect(
                url,
                open_timeout=timeout,
                close_timeout=1,
                compression=None,
                max_size=LONGEST_MESSAGE,
                **({"proxy": None} if local else {}),
            )
            self._socket = self._opened.enter_context(connection)
        except library.exceptions.WebSocketException as error:
            raise RemoteFault(
                f"{self._episode.url} is not an OpenEnv server: {error or type(error).__name__}"
            ) from None

    def _request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a message and returns the answer."""
        closed = import_library("websockets").exceptions.ConnectionClosed
        url = self._episode.url
        try:
            with suppress(closed):  # a busy server says so and closes
                self._socket.send(json.dumps({"type": kind, "data": data}))
            received = self._socket.recv(timeout=self._timeout)
        except TimeoutError:
            raise RemoteFault(
                f"{url} does not answer `{kind}` within {self._timeout:g} s"
            ) from None
        except closed as error:
            raise RemoteFault(f"{url} ended the connection in `{kind}`: {error}") from None
        return read_message(received, url)

    def _read_reply(self, message: Mapping[str, Any]) -> RemoteReply:
        url, data = self._episode.url, message.get("data")
        if message.get("type") == "error":
            raise RemoteFault(f"{url} reports {_get_code(message)}: {_get_text(message)}")
        if not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
            raise RemoteFault(f"{url} sent no observation: {json.dumps(message)[:200]}")
        metadata = data.get("metadata")
        return RemoteReply(
            observation=self._read_observation(data["observation"]),
            reward=read_number(data.get("reward"), "reward", url),
            done=data.get("done") is True,
            info={
                str(name): value
                for name, value in (metadata if isinstance(metadata, dict) else {}).items()
                if isinstance(value, bool | int | float)
            },
        )

    def _read_observation(self, observation: Mapping[str, Any]) -> str:
        name = self._episode.observation
        if not name:
            shown = {key: value for key, value in observation.items() if key != "metadata"}
            return f"{json.dumps(shown, ensure_ascii=False)}\n"
        if name not in observation:
            raise RemoteFault(_describe_field(self._episode.url, "observations", name, observation))
        value = observation[name]
        return f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"

    def _check_fields(self, message: Mapping[str, Any]) -> None:
        """Raises RemoteFault if the server's actions have other fields."""
        errors = message["data"].get("errors")
        errors = [e for e in errors if isinstance(e, dict)] if isinstance(errors, list) else []
        names = {str((e.get("loc") or [""])[-1]): e.get("type") for e in errors}
        if any(kind in _FIELD_ERRORS for kind in names.values()):
            missing = [name for name, kind in names.items() if kind == "missing"]
            raise RemoteFault(_describe_field(self._episode.url, "actions", self._action, missing))


def _describe_field(url: str, what: str, name: str, known: Any) -> str:
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"they have {', '.join(names) or 'no others'}"
    return f"the {what} of {url} have no field {name!r}; {hint}"


def _get_code(message: Mapping[str, Any]) -> Any:
    data = message.get("data")
    return data.get("code") if message.get("type") == "error" and isinstance(data, dict) else None


def _get_text(message: Mapping[str, Any]) -> str:
    data = message.get("data")
    return str(data.get("message") if isinstance(data, dict) else data)[:200]
