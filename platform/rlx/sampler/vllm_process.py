"""The process of a vLLM worker, its environment, and the pipe to it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from rlx.errors import EnvironmentFault, RlxError
from rlx.sampler.channel import Channel
from rlx.sampler.transfer import Group, PublishedWeights, join_process_group
from rlx.spec import RunnerSpec
from rlx.text import escape_unprintable

__all__ = [
    "WorkerGone",
    "WorkerProcess",
    "WorkerRefusal",
    "build_worker_environment",
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
    """A worker process and the pipe to it, which closes when this process ends for any reason."""

    def __init__(
        self, environment: Mapping[str, str], folders: Sequence[Path], device: torch.device
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
            )

    def ask(
        self, message: Mapping[str, Any], doing: str, weights: PublishedWeights | None = None
    ) -> dict[str, Any]:
        """Sends a message and waits for the answer.

        Raises:
            WorkerGone: the worker is dead.
            WorkerRefusal: the worker failed and has ended.
        """
        try:
            if weights is None:
                self._channel.send(message)
            else:
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

    def _send(self, message: Mapping[str, Any], weights: PublishedWeights) -> None:
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
    ranks, number = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    number += 0 if colocate else ranks
    if number >= len(names):
        raise EnvironmentFault(
            f"sampler.colocate is false, which needs {2 * ranks} GPUs for {ranks} ranks, but "
            f"there are {len(names)}: add GPUs, or lower runner.ranks"
        )
    return {"CUDA_VISIBLE_DEVICES": names[number]}


SAME_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Has vLLM use the model runner on a GPU that it uses on a CPU, where rlx is tested with it."""


def build_worker_environment(runner: RunnerSpec, device: torch.device) -> dict[str, str]:
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
            "OMP_NUM_THREADS": str(runner.threads),
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "ERROR" if device.type == "cpu" else "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
    )
