"""Joins the process group of ranks, without compiling DeepSpeed kernels."""

import datetime
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.errors import EnvironmentFault
from rlx.spec import RunnerSpec

__all__ = ["Ranks", "join_ranks"]

T = TypeVar("T")

TIMEOUT = datetime.timedelta(hours=6)
"""Maximum wait of a rank for the others. It is long, since the first rank may train a warm start or
hash a checkpoint meanwhile; `runner.hang_after` ends a run that makes no progress."""
PART = 64 << 20
"""Bytes of a file that are copied to another rank at once."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run, seen from one of them.

    Attributes:
        rank: of this process.
        count: number of ranks.
        device: on which this rank computes.
        disks: the disk of each rank's run folder; () if all see the same one.
    """

    rank: int
    count: int
    device: torch.device
    disks: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that writes records."""
        return self.rank == 0

    @property
    def keeps_disk(self) -> bool:
        """Whether this is the first of the ranks that see its disk."""
        return self.rank == (self.disks.index(self.disks[self.rank]) if self.disks else 0)

    @property
    def _keeps_other_disk(self) -> bool:
        return self.keeps_disk and not self.is_first

    @property
    def beside_first(self) -> Sequence[int]:
        """The ranks that see the disk of rank 0."""
        if not self.disks:
            return range(self.count)
        return [rank for rank, disk in enumerate(self.disks) if disk == self.disks[0]]

    def gather(self, item: T) -> list[T]:
        """Gathers every rank's item, in order of rank, on every rank."""
        if self.count == 1:
            return [item]
        items: list[Any] = [None] * self.count
        dist.all_gather_object(items, item)
        return items

    def sum_tensors(self, tensor: Tensor) -> Tensor:
        """Sums a CPU tensor over the ranks; the result is the same on every rank.

        Only the sum travels, so memory does not grow with the number of ranks.
        """
        if self.count == 1:
            return tensor
        total = tensor.to(self.device)  # NCCL has no CPU tensors
        dist.all_reduce(total)
        return total.cpu()

    def barrier(self) -> None:
        """Waits until every rank reaches this call."""
        if self.count > 1:
            dist.barrier()

    @contextmanager
    def share_folder(self, folder: Path) -> Iterator[None]:
        """Copies a folder of rank 0 to the disks of ranks that do not see it, until the block ends.

        Every rank calls it, when rank 0 has the folder, with its own path of it.
        """
        sizes: dict[str, int] = {}
        if self.disks:
            sizes = self.gather(_list_sizes(folder) if self.is_first else {})[0]
        keepers = {self.disks.index(disk) for disk in self.disks}
        for name, size in sizes.items():
            self._copy_file(folder / name, size, 0, keepers)
        self.barrier()
        yield
        if self.disks:
            self.barrier()  # no neighbour reads it any more
        if self._keeps_other_disk:
            shutil.rmtree(folder)

    def collect_folder(self, folder: Path) -> None:
        """Moves to rank 0 what is in this folder on disks that it does not see.

        Every rank calls it, when all have written, with its own path of the folder.
        """
        sizes: list[dict[str, int]] = []
        if self.disks:
            sizes = self.gather(_list_sizes(folder) if self._keeps_other_disk else {})
        for rank, own in enumerate(sizes):
            for name, size in own.items():
                self._copy_file(folder / name, size, rank, {0, rank})
        if self._keeps_other_disk:
            shutil.rmtree(folder)
        self.barrier()

    def _copy_file(self, path: Path, size: int, source: int, keepers: set[int]) -> None:
        """Copies a file of the rank `source` to the other keepers; all ranks take part."""
        with ExitStack() as ending:
            if self.rank == source:
                reader = ending.enter_context(path.open("rb"))
            elif self.rank in keepers:
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = ending.enter_context(path.open("wb"))
            for start in range(0, size, PART):
                part = torch.empty(min(PART, size - start), dtype=torch.uint8)
                if self.rank == source:
                    reader.readinto(part.numpy().data)
                moved = part.to(self.device)  # NCCL has no CPU tensors
                dist.broadcast(moved, source)
                if self.rank in keepers - {source}:
                    writer.write(moved.cpu().numpy().data)


def _list_sizes(folder: Path) -> dict[str, int]:
    """The size in bytes of each file in a folder, by path in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def join_ranks(runner: RunnerSpec, disk: str = "") -> Ranks:
    """Joins the process group described by torchrun's environment variables.

    Args:
        runner: names the device and the threads.
        disk: names the disk of this rank's run folder, if it is not that of rank 0.

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
    alone = Ranks(dist.get_rank(), dist.get_world_size(), device)
    disks = alone.gather(disk)
    return replace(alone, disks=tuple(disks) if len(set(disks)) > 1 else ())
