"""A pool of vLLM servers on the machine of the ranks that ask them.

The first rank of the machine keeps the servers (`rlx.sampler.vllm_keeper`). All ask them over
sockets in a folder that the machine's ranks share.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx.model import Policy
from rlx.sampler.server_pool import ServerFacts
from rlx.sampler.transfer import SHARED_MEMORY, publish_weights
from rlx.sampler.vllm_connection import ServerConnections
from rlx.sampler.vllm_keeper import PoolKeeper, require_short_path
from rlx.sampler.vllm_process import build_worker_environment, select_pool_gpus
from rlx.sampler.vllm_settings import ModelFiles, build_worker_settings
from rlx.spec import RunnerSpec, VllmSamplerSpec

__all__ = ["MachinePool"]


class MachinePool:
    """The servers of this machine; see `rlx.sampler.server_pool.ServerPool`.

    Args:
        policy: provides the configuration and tokenizer; not kept.
        spec: the `sampler:` section, which has a pool.
        runner: precision, and threads of each server.
        device: device of the rank.

    Raises:
        EnvironmentFault: there are too few GPUs.
        RlxError: vLLM cannot run this model here.
    """

    place = "on this machine"

    def __init__(
        self, policy: Policy, spec: VllmSamplerSpec, runner: RunnerSpec, device: torch.device
    ) -> None:
        assert spec.pool is not None
        self.publishes = int(os.environ.get("LOCAL_RANK", 0)) == 0
        self._folders = _name_folders()
        numbers = range(spec.pool.servers)
        self._connections = [ServerConnections(self._folders[0], number) for number in numbers]
        self._keeper: PoolKeeper | None = None
        if self.publishes:
            try:
                self._keeper = self._start_servers(policy, spec, runner, device)
                self._keeper.await_start()
            except BaseException:
                self.close()
                raise

    def _start_servers(
        self, policy: Policy, spec: VllmSamplerSpec, runner: RunnerSpec, device: torch.device
    ) -> PoolKeeper:
        assert spec.pool is not None
        gpus = select_pool_gpus(spec.pool, device)
        place, _ = self._folders
        require_short_path(place)
        place.mkdir(mode=0o700)
        ModelFiles(policy).write(place)
        common = build_worker_environment(runner.threads, device)
        settings = build_worker_settings(policy, spec, runner, device)
        return PoolKeeper(place, settings, [common | own for own in gpus], device)

    @property
    def restarts(self) -> int:
        """See `rlx.sampler.server_pool.ServerPool`."""
        return self._keeper.restarts if self._keeper else 0

    def describe(self) -> list[ServerFacts]:
        """See `rlx.sampler.server_pool.ServerPool`."""
        refusal = self._keeper.refusal if self._keeper else None
        with ThreadPoolExecutor(len(self._connections)) as threads:
            told = list(threads.map(ServerConnections.reach, self._connections))
        return [ServerFacts(one["longest"], one["takes_adapter"], refusal) for one in told]

    def publish(self, kind: str, version: int, weights: Mapping[str, Tensor]) -> None:
        """See `rlx.sampler.server_pool.ServerPool`."""
        assert self._keeper is not None
        self._keeper.publish(kind, version, publish_weights("file", weights, self._folders))

    def ask(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """See `rlx.sampler.server_pool.ServerPool`."""
        return self._connections[number].ask(message)

    def close(self) -> None:
        """See `rlx.sampler.server_pool.ServerPool`."""
        for connection in self._connections:
            connection.close()
        if self._keeper is not None:
            self._keeper.close()
        for folder in self._folders if self.publishes else ():
            shutil.rmtree(folder, ignore_errors=True)


def _name_folders() -> tuple[Path, Path]:
    """The pool's folder, the same on all ranks of this machine, and one in shared memory, where all
    users write, under a name that none of them can guess.

    Ranks of one attempt have a temporary folder of their own, after which their supervisor sweeps.
    """
    temporary, token = Path(tempfile.gettempdir()), secrets.token_hex(4)
    is_alone = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == 1
    pool = temporary / f"rlx-vllm-{token if is_alone else 'pool'}"
    return pool, SHARED_MEMORY / f"{temporary.name}-rlx-vllm-{token}"
