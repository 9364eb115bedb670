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
    """Joins the process group that torchrun describes in the environment.

    Raises:
        EnvironmentFault: a CUDA device is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if runner.device == "cuda" and not has_gpu:
        raise EnvironmentFault("runner.device is 'cuda', but torch finds no CUDA device here")
    on_gpu = has_gpu and runner.device != "cpu"
    local = int(os.environ["LOCAL_RANK"])
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
