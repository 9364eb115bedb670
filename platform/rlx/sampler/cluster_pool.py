"""A pool of vLLM servers on a Ray cluster, which all ranks of a run ask.

The driver of the run makes their actors (`rlx.launch.ray_servers`), and Ray places them and starts
one again that is lost. The first rank leaves the model's files, and all weights, in Ray's object
store, and references to them with a small actor, where every server finds what a request wants. No
rank therefore has to know which weights a server has, also if that was just started again.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import save
from torch import Tensor

from rlx.errors import EnvironmentFault, RlxError
from rlx.model import Policy
from rlx.ray_client import find_actors, join_ray
from rlx.sampler.server_pool import LOAD, ServerFacts
from rlx.sampler.servers_address import SERVERS, ServersAddress
from rlx.sampler.transfer import drop_tied_weights
from rlx.sampler.vllm_keeper import print_line
from rlx.sampler.vllm_settings import ModelFiles, build_worker_settings
from rlx.spec import RunnerSpec, VllmSamplerSpec
from rlx.text import escape_unprintable

__all__ = ["ClusterPool", "ServedModel"]

LOOK = 0.25
"""Seconds between two looks whether this rank still wants an answer."""
CHUNK = 1 << 28
"""Bytes of weights that travel together, if no weight is larger."""


class ServedModel(TypedDict):
    """What servers start from.

    Attributes:
        files: the contents of the files of a model without weights, by relative path.
        settings: as for `rlx.sampler.vllm_worker.VllmWorker`, without a folder.
        threads: of each server, on a CPU.
    """

    files: dict[str, bytes]
    settings: dict[str, Any]
    threads: int


class ClusterPool:
    """The servers of a run; see `rlx.sampler.server_pool.ServerPool`.

    Args:
        policy: provides the configuration and tokenizer; not kept.
        spec: the `sampler:` section, which has a pool.
        runner: precision, and threads of each server.
        device: device of the rank; servers compute on others of the same kind.

    Raises:
        ConnectionError: the cluster or an actor is lost.
    """

    place = "on the Ray cluster"

    def __init__(
        self, policy: Policy, spec: VllmSamplerSpec, runner: RunnerSpec, device: torch.device
    ) -> None:
        import ray

        address: ServersAddress = json.loads(os.environ[SERVERS])
        self.publishes = int(os.environ.get("RANK", 0)) == 0
        self._is_closed = False
        self._published: dict[str, tuple[int, list[Any]]] = {}
        self._exit = ExitStack()
        try:
            self._exit.enter_context(join_ray(address["cluster"]))
            names = [*address["names"], address["store"]]
            *self._servers, self._store = find_actors(names, address["namespace"])
            self._restarts: list[dict[int, int]] = [{} for _ in self._servers]
            if self.publishes:
                settings = build_worker_settings(policy, spec, runner, device)
                model: ServedModel = {
                    "files": _read_files(ModelFiles(policy)),
                    "settings": settings,
                    "threads": runner.threads,
                }
                self._model = [ray.put(model)]
                self._wait_for(self._store.publish_model.remote(self._model))
        except BaseException:
            self._exit.close()
            raise

    @property
    def restarts(self) -> int:
        """See `rlx.sampler.server_pool.ServerPool`."""
        if not self.publishes:
            return 0
        return sum(
            max(lives, default=0) + sum(lives.values()) for lives in map(dict, self._restarts)
        )

    def describe(self) -> list[ServerFacts]:
        """See `rlx.sampler.server_pool.ServerPool`."""
        asked = [server.describe.remote() for server in self._servers]
        told = [self._take(number, answer) for number, answer in enumerate(asked)]
        return [ServerFacts(o["longest"], o["takes_adapter"], o["refusal"]) for o in told]

    def publish(self, kind: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """See `rlx.sampler.server_pool.ServerPool`."""
        import ray

        chunks = [ray.put(save(chunk)) for chunk in _cut_chunks(weights)]
        kept = {} if kind == LOAD else self._published
        self._published = {**kept, kind: (version, chunks)}
        self._wait_for(self._store.publish.remote(version, self._published))
        asked = [server.load.remote(version) for server in self._servers]
        for number, answer in enumerate(asked):
            self._take(number, answer)

    def ask(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """See `rlx.sampler.server_pool.ServerPool`."""
        return self._take(number, self._servers[number].generate.remote(dict(message)))

    def close(self) -> None:
        """See `rlx.sampler.server_pool.ServerPool`; the driver of the run ends its servers."""
        self._is_closed = True
        self._exit.close()

    def _take(self, number: int, answer: Any) -> dict[str, Any]:
        """Waits for the answer of a server, and prints what it says of itself."""
        told: dict[str, Any] = self._wait_for(answer)
        for line in told["lines"]:
            print_line(line)
        self._restarts[number][told["life"]] = told["restarts"]
        if "error" in told:
            is_fault = told["exit_code"] == EnvironmentFault.exit_code
            raise (EnvironmentFault if is_fault else RlxError)(told["error"])
        return told

    def _wait_for(self, answer: Any) -> Any:
        """Waits for the answer of an actor, which Ray has started again if it was lost.

        Raises:
            RlxError: this rank has left the pool, or the actor failed in another way.
            ConnectionError: the actor is lost.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            while not ray.wait([answer], timeout=LOOK)[0]:
                if self._is_closed:
                    raise RlxError("this rank has left the pool of vLLM servers")
            return ray.get(answer)
        except RayTaskError as error:
            why = escape_unprintable(f"{type(error.cause).__name__}: {error.cause}")
            raise RlxError(f"a vLLM server of the cluster failed: {why}") from error
        except RayError as error:
            why = escape_unprintable(str(error).strip().splitlines()[-1])
            raise ConnectionError(
                f"a vLLM server of the cluster, or the actor that knows its weights, is lost: {why}"
            ) from error


def _read_files(model: ModelFiles) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        model.write(Path(name))
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        return {str(path.relative_to(name)): path.read_bytes() for path in files}


def _cut_chunks(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yields weights in parts that travel together."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, weight in drop_tied_weights(weights).items():
        if chunk and size + weight.nbytes > CHUNK:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = weight.contiguous()
        size += weight.nbytes
    yield chunk
