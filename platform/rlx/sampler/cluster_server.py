"""A vLLM server of a pool on a Ray cluster, as its actor keeps it.

It is a pool of one server on its machine (`rlx.sampler.vllm_keeper`), which is replaced if it ends.
It finds the weights that a request wants by itself.
"""

import secrets
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors.torch import load

from rlx.errors import RlxError
from rlx.sampler.cluster_pool import ServedModel
from rlx.sampler.transfer import SHARED_MEMORY, publish_weights
from rlx.sampler.vllm_connection import ServerConnection
from rlx.sampler.vllm_keeper import PoolKeeper, require_short_path
from rlx.sampler.vllm_process import build_worker_environment

__all__ = ["ClusterServer"]

MOST = 1000
"""Lines about it that it keeps until a rank takes them."""


class ClusterServer:
    """One server; its methods may be called by several threads.

    What it answers is what the server has said, with `lines` about it since the last answer, and
    `restarts`, how often it was replaced. If the server can never do something, the answer has an
    `error`.

    Args:
        number: its number.
        store: the actor that knows the model and its current weights.
    """

    def __init__(self, number: int, store: Any) -> None:
        self._number, self._store = number, store
        self._lines: deque[str] = deque(maxlen=MOST)
        self._lock = Lock()
        self._keeper: PoolKeeper | None = None
        self._lost = 0
        self._facts: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._idle: list[ServerConnection] = []
        folder = Path(tempfile.gettempdir())
        self._place = folder / "pool"
        self._folders = (
            self._place,
            SHARED_MEMORY / f"{folder.name}-rlx-vllm-{secrets.token_hex(4)}",
        )

    def describe(self) -> dict[str, Any]:
        """Starts the server, unless it runs; returns what it says of itself."""
        try:
            self._open()
        except RlxError as error:
            return self._answer({"error": str(error)})
        return self._answer(self._facts)

    def load(self, version: int) -> dict[str, Any]:
        """Loads the weights of a number as soon as they are published, unless it has them."""
        try:
            self._require_weights(version)
        except RlxError as error:
            return self._answer({"error": str(error)})
        return self._answer({})

    def generate(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Generates rows with the weights that a request names."""
        try:
            self._require_weights(message["version"])
            connection = self._connect()
            answer = connection.ask(message)
            self._idle.append(connection)
        except RlxError as error:
            return self._answer({"error": str(error)})
        return self._answer(answer)

    def close(self) -> None:
        """Ends the server."""
        for connection in self._idle:
            connection.close()
        if self._keeper is not None:
            self._keeper.close()

    def _answer(self, told: Mapping[str, Any]) -> dict[str, Any]:
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        restarts = self._lost + (self._keeper.restarts if self._keeper else 0)
        return {**told, "lines": lines, "restarts": restarts}

    def _open(self) -> PoolKeeper:
        import ray

        with self._lock:
            if self._keeper is None:
                self._lost, (reference,) = ray.get(self._store.start.remote(self._number))
                self._keeper = self._start(ray.get(reference))
            return self._keeper

    def _start(self, model: ServedModel) -> PoolKeeper:
        require_short_path(self._place)
        self._place.mkdir(mode=0o700, exist_ok=True)
        for name, content in model["files"].items():
            (self._place / name).write_bytes(content)
        self._dtype: torch.dtype = getattr(torch, model["dtype"])
        device = torch.device(model["settings"]["device"])
        environment = build_worker_environment(model["threads"], device)
        keeper = PoolKeeper(
            self._place,
            model["settings"],
            [environment],
            device,
            report=self._lines.append,
            first=self._number,
        )
        connection = ServerConnection(self._place, self._number, self._lines.append)
        try:
            told = connection.reach()
        except BaseException:
            keeper.close()
            raise
        self._idle.append(connection)
        self._facts = {**told, "refusal": keeper.refusal}
        return keeper

    def _connect(self) -> ServerConnection:
        """A connection that no other thread uses."""
        try:
            return self._idle.pop()
        except IndexError:
            connection = ServerConnection(self._place, self._number, self._lines.append)
            connection.reach()
            return connection

    def _require_weights(self, version: int) -> None:
        """Loads what is published, unless it has the weights of a number."""
        import ray

        keeper = self._open()
        with self._lock:
            if version in self._versions.values():
                return
            published = ray.get(self._store.find.remote(version))
            for kind, (number, chunks) in published.items():
                if self._versions.get(kind) == number:
                    continue
                weights: dict[str, torch.Tensor] = {}
                for chunk in chunks:
                    weights |= load(ray.get(chunk))
                here = torch.device("cpu")
                keeper.publish(
                    kind,
                    number,
                    publish_weights("file", weights, self._dtype, here, self._folders),
                )
            self._versions = {kind: number for kind, (number, _) in published.items()}
