"""Joining the other ranks, without compiling anything."""

import datetime
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlx.errors import EnvironmentFault
from rlx.spec import RunnerSpec

__all__ = ["Ranks", "join_ranks"]

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who this process is among its peers, and where it computes."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0 records; the others compute."""
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """Every rank's item, in order of rank, on every rank."""
        if self.count == 1:
            return [item]
        items: list[Any] = [None] * self.count
        dist.all_gather_object(items, item)
        return items

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.count > 1:
            dist.barrier()


def join_ranks(runner: RunnerSpec) -> Ranks:
    """Joins the process group that the environment describes as torchrun does.

    Raises:
        EnvironmentFault: a CUDA device is asked for, or there are some, and none for this rank.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = runner.device == "cuda" or (runner.device == "auto" and count > 0)
    if on_gpu and local >= count:
        raise EnvironmentFault(
            f"rank {local} has no CUDA device: torch finds {count} here; `rlx doctor` says why, "
            "and `runner.device: cpu` does without"
        )
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        # DeepSpeed compiles a shared-memory all-reduce when it starts on CPU; only its inference
        # uses it, and it needs a compiler that a user's machine may lack.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed(
            dist_backend="nccl" if on_gpu else "gloo", verbose=False, timeout=TIMEOUT
        )
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(runner.threads)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)
