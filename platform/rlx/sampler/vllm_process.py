"""The process of a vLLM worker, its environment, and the pipe to it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

import torch

from rlx.errors import EnvironmentFault, RlxError
from rlx.sampler.channel import Channel
from rlx.sampler.transfer import Group, PublishedWeights, join_process_group
from rlx.spec import SamplerPoolSpec
from rlx.text import escape_unprintable

__all__ = [
    "WorkerGone",
    "WorkerProcess",
    "WorkerRefusal",
    "build_worker_environment",
    "select_pool_gpus",
    "select_worker_gpu",
]

WORKER = "rlx.sampler.vllm_worker"
LEAVING = 10.0
"""Seconds that a worker has to exit before it is killed."""
OTHERS = ("TORCHELASTIC_", "GROUP_", "LOCAL_", "MASTER_", "ROLE_", "RANK", "WORLD_SIZE")
"""Environment variables that torchrun sets for a rank; with them, vLLM would act as a rank."""


class WorkerGone(Exception):
    """The worker process ended without an answer."""


class WorkerRefusal(RlxError):
    """The worker answered that it could not do something, and has ended.

    Attributes:
        why: its own words, on one line.
    """

    def __init__(self, doing: str, why: str) -> None:
        self.why = why
        super().__init__(
            f"vLLM could not {doing}: {why}; the full error is in the run's log; set "
            "sampler.engine: transformers to sample without vLLM"
        )


class WorkerProcess:
    """A worker process and the pipe to it, which closes when this process ends for any reason.

    Args:
        environment: its environment variables.
        folders: folders that are removed when it has ended.
        device: device of the rank.
        apart: whether it has a process group of its own, and its output can be read from `output`.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        folders: Sequence[Path],
        device: torch.device,
        *,
        apart: bool = False,
    ) -> None:
        ours, theirs = Pipe()
        self._channel, self._folders, self._device = Channel(ours), folders, device
        self._group: Group | None = None
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno()), *map(str, folders)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0 if apart else None,
                stdout=subprocess.PIPE if apart else None,
                stderr=subprocess.STDOUT if apart else None,
            )

    @property
    def pid(self) -> int:
        """Its process id, which is that of its process group, too."""
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """What it and the processes that it started write."""
        assert self._process.stdout is not None
        return self._process.stdout

    def wait(self) -> int:
        """Waits for the process to end; returns its exit code, negative for a signal."""
        return self._process.wait()

    def ask(
        self, message: Mapping[str, Any], doing: str, weights: PublishedWeights | None = None
    ) -> dict[str, Any]:
        """Sends a message and waits for the answer.

        Raises:
            WorkerGone: the worker is dead.
            WorkerRefusal: the worker failed and has ended.
        """
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                # A worker that fails may say why, and end, before it has read all of this.
                self._send(message, weights)
            answer = self._channel.receive()
        except (EOFError, OSError) as error:
            self.close()
            raise WorkerGone(
                f"the vLLM worker, process {self._process.pid}, ended with exit code "
                f"{self._process.returncode}"
            ) from error
        if "error" in answer:
            self.close()
            raise WorkerRefusal(doing, escape_unprintable(answer["error"]))
        return answer

    def _send(self, message: Mapping[str, Any], weights: PublishedWeights | None) -> None:
        if weights is None:
            self._channel.send(message)
            return
        place = self._folders[0] / "meeting"
        self._channel.send({**message, **weights.message, "place": str(place)})
        if self._group is None and weights.message["way"] == "nccl":
            self._group = join_process_group(place, 0, self._device)
        weights.send(self._channel, self._group)

    def close(self) -> None:
        """Waits for the process to exit, and kills it if it does not."""
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVING)
        self._process.kill()
        self._process.wait()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def select_worker_gpu(device: torch.device, *, colocate: bool) -> dict[str, str]:
    """Returns the environment that shows a worker one GPU: that of its rank if colocated, otherwise
    one after those of all local ranks.

    Raises:
        EnvironmentFault: there are too few GPUs.
    """
    if device.type != "cuda":
        return {}
    names, ranks, number = _list_gpus(), _count_ranks_here(), device.index or 0
    number += 0 if colocate else ranks
    if number >= len(names):
        raise EnvironmentFault(
            f"sampler.colocate is false, which needs {2 * ranks} GPUs for {ranks} ranks, but "
            f"there are {len(names)}: add GPUs, or lower runner.ranks"
        )
    return {"CUDA_VISIBLE_DEVICES": names[number]}


def select_pool_gpus(pool: SamplerPoolSpec, device: torch.device) -> list[dict[str, str]]:
    """Returns the environment that shows each server of a machine's pool its GPUs, which come after
    those of all local ranks.

    Raises:
        EnvironmentFault: there are too few GPUs.
    """
    if device.type != "cuda":
        return [{} for _ in range(pool.servers)]
    names, ranks, each = _list_gpus(), _count_ranks_here(), pool.tensor_parallel
    if (need := ranks + pool.devices) > len(names):
        raise EnvironmentFault(
            f"{ranks} ranks and sampler.pool with {pool.servers} servers on {each} GPUs each need "
            f"{need} GPUs, but there are {len(names)}: lower runner.ranks, sampler.pool.servers or "
            "sampler.pool.tensor_parallel"
        )
    starts = range(ranks, need, each)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[n : n + each])} for n in starts]


def _count_ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _list_gpus() -> list[str]:
    """Names of the visible GPUs, as CUDA_VISIBLE_DEVICES has them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]


SAME_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Has vLLM use the model runner on a GPU that it uses on a CPU, where rlx is tested with it."""


def build_worker_environment(threads: int, device: torch.device) -> dict[str, str]:
    """Returns the worker's environment: one process, no network, little logging.

    On a CPU nothing is compiled: the model is run eagerly there, and for one small function of its
    own vLLM would have every worker call a C++ compiler, for more seconds than all else takes.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
    by_device = {"TORCH_COMPILE_DISABLE": "1"} if device.type == "cpu" else SAME_RUNNER
    return (
        inherited
        | by_device
        | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "ERROR" if device.type == "cpu" else "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            # Of tensor parallelism:
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2",
        }
    )
