"""A vLLM server of a pool on a Ray cluster, as its actor keeps it.

It is a pool of one server on its machine (`rlx.sampler.vllm_keeper`), which is replaced if it ends.
It finds the weights that a request wants by itself.
"""

import secrets
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors.torch import load

from rlx.errors import RlxError
from rlx.sampler.cluster_pool import ServedModel
from rlx.sampler.transfer import SHARED_MEMORY, publish_weights
from rlx.sampler.vllm_connection import ServerConnections
from rlx.sampler.vllm_keeper import PoolKeeper, require_short_path
from rlx.sampler.vllm_process import build_worker_environment

__all__ = ["ClusterServer"]

MOST = 1000
"""Lines about it that it keeps until a rank takes them."""


class ClusterServer:
    """One server; its methods may be called by several threads.

    What it answers is what the server has said, with `lines` about it since the last answer, its
    `life`, which is the number of actors that have kept it before, and `restarts`, how often this
    one has replaced it. If the server can never do something, the answer has an `error`, and the
    `exit_code` of a run that ends with it.

    Args:
        number: its number.
        store: the actor that knows the model and its current weights.
        folder: a temporary folder of its own.
    """

    def __init__(self, number: int, store: Any, folder: Path) -> None:
        self._number, self._store, self._folder = number, store, folder
        self._shared = SHARED_MEMORY / f"{folder.name}-rlx-vllm-{secrets.token_hex(4)}"
        self._lines: deque[str] = deque(maxlen=MOST)
        self._lock = Lock()
        self._keeper: PoolKeeper | None = None
        self._failure: RlxError | None = None
        self._life = 0
        self._facts: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._connections = ServerConnections(folder, number, self._lines.append)
        self._is_closed = False

    def describe(self) -> dict[str, Any]:
        """Starts the server, unless it runs; returns what it says of itself."""

        def open_server() -> dict[str, Any]:
            self._open()
            return self._facts

        return self._answer(open_server)

    def load(self, version: int) -> dict[str, Any]:
        """Loads the weights of a number as soon as they are published, unless it has them."""

        def load_weights() -> dict[str, Any]:
            self._require_weights(version)
            return {}

        return self._answer(load_weights)

    def generate(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Generates rows with the weights that a request names, or later ones."""

        def generate_rows() -> dict[str, Any]:
            self._require_weights(message["version"])
            return self._connections.ask(message)

        return self._answer(generate_rows)

    def close(self) -> None:
        """Ends the server, also while it starts."""
        self._is_closed = True
        self._connections.close()
        if self._keeper is not None:
            self._keeper.close()
        shutil.rmtree(self._shared, ignore_errors=True)

    def _answer(self, work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        try:
            told |= work()
        except RlxError as error:
            told = {"error": str(error), "exit_code": error.exit_code}
        lines = []
        with suppress(IndexError):  # there are no more
            while True:
                lines.append(self._lines.popleft())
        restarts = self._keeper.restarts if self._keeper else 0
        return {**told, "lines": lines, "life": self._life, "restarts": restarts}

    def _open(self) -> PoolKeeper:
        """Starts the server once; whoever asks later is told why it could not start."""
        import ray

        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._keeper is None:
                self._life, (reference,) = ray.get(self._store.start.remote(self._number))
                try:
                    self._start(ray.get(reference))
                except RlxError as error:
                    self._failure = error
                    raise
            assert self._keeper is not None
            return self._keeper

    def _start(self, model: ServedModel) -> None:
        require_short_path(self._folder)
        for name, content in model["files"].items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        device = torch.device(model["settings"]["device"])
        environment = build_worker_environment(model["threads"], device)
        self._keeper = keeper = PoolKeeper(
            self._folder,
            model["settings"],
            [environment],
            device,
            report=self._lines.append,
            first=self._number,
        )
        if self._is_closed:
            keeper.close()
        keeper.await_start()
        self._facts = {**self._connections.reach(), "refusal": keeper.refusal}

    def _require_weights(self, version: int) -> None:
        """Loads what is published, unless it has the weights of a number, or later ones."""
        import ray

        keeper = self._open()
        if version <= max(self._versions.values(), default=0):
            return
        # Without the lock: those before may have to be loaded first, or they never come.
        published = ray.get(self._store.find.remote(version))
        with self._lock:
            newest = max(number for number, _ in published.values())
            if newest <= max(self._versions.values(), default=0):
                return
            for kind, (number, chunks) in published.items():
                if self._versions.get(kind) == number:
                    continue
                weights: dict[str, torch.Tensor] = {}
                for chunk in chunks:
                    weights |= load(ray.get(chunk))
                folders = self._folder, self._shared
                keeper.publish(kind, number, publish_weights("file", weights, folders))
            self._versions = {kind: number for kind, (number, _) in published.items()}
