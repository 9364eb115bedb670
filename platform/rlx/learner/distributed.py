"""Joins the process group of ranks, without compiling DeepSpeed kernels."""

import datetime
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.errors import EnvironmentFault
from rlx.spec import RunnerSpec

T = TypeVar("T")

TIMEOUT = datetime.timedelta(hours=6)
"""Maximum wait of a rank for the others: the first may train a warm start or hash a checkpoint.
`runner.hang_after` ends a run that makes no progress."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run, seen from one of them, which computes on `device`."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that writes records."""
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """Gathers every rank's item, in order of rank, on every rank."""
        if self.count == 1:
            return [item]
        items: list[Any] = [None] * self.count
        dist.all_gather_object(items, item)
        return items

    def sum_tensors(self, tensor: Tensor) -> Tensor:
        """Sums a CPU tensor over the ranks; the result is the same on every rank."""
        if self.count == 1:
            return tensor
        total = tensor.to(self.device)  # NCCL has no CPU tensors
        dist.all_reduce(total)
        return total.cpu()

    def barrier(self) -> None:
        """Waits until every rank reaches this call."""
        if self.count > 1:
            dist.barrier()


def join_ranks(runner: RunnerSpec) -> Ranks:
    """Joins the process group described by torchrun's environment variables.

    Raises:
        EnvironmentFault: the run uses CUDA (by request, or because there are GPUs), and there is no
            GPU for this rank.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = runner.device == "cuda" or (runner.device == "auto" and count > 0)
    if on_gpu and local >= count:
        raise EnvironmentFault(
            f"rank {local} has no CUDA device: torch finds {count}; run `rlx check` for the "
            "cause, or set `runner.device: cpu`"
        )
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        # On CPU, DeepSpeed compiles a shared-memory all-reduce at start. Only its inference uses
        # it, and the user's machine may lack a compiler.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed(
            dist_backend="nccl" if on_gpu else "gloo", verbose=False, timeout=TIMEOUT
        )
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(runner.threads)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)
