"""How whole weights get from a rank into its vLLM worker: three ways, from the side of either.

A way tells the worker with a message what is about to come, and then sends it:

* `file`: one file in shared memory, on any machine;
* `ipc`: the rank's own copy on the GPU, which the worker reads in place (CUDA IPC);
* `nccl`: a broadcast to the worker's GPU, which is another one (on a CPU: Gloo).

What was published is kept until the next time: a worker that replaces a killed one takes it too.
"""

import os
import pickle
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rlx.sampler.channel import Channel

__all__ = [
    "SHARED_MEMORY",
    "Group",
    "PublishedWeights",
    "join_process_group",
    "publish_weights",
    "receive_weights",
]

SHARED_MEMORY = Path("/dev/shm")
PATIENCE = timedelta(minutes=10)
DEVICE = 6
"""Where `rebuild_cuda_tensor` takes the number of the GPU."""
FROM_RANK = dist.BroadcastOptions()
FROM_RANK.rootRank = 0

Group = dist.ProcessGroup
"""A rank, as 0, and its worker, as 1."""


class PublishedWeights(ABC):
    """Weights of one version, tied ones once.

    Attributes:
        message: what the worker is told before.
    """

    message: Mapping[str, Any]

    @abstractmethod
    def send(self, channel: Channel, group: Group | None) -> None:
        """Gives the weights to a worker that has been told.

        Raises:
            EOFError, OSError: the worker is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the weights."""


def publish_weights(
    way: str,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    folders: tuple[Path, Path],
) -> PublishedWeights:
    """Takes hold of weights as they are now.

    Args:
        way: `file`, `ipc` or `nccl`.
        weights: by name; tied ones may be named once or twice.
        dtype: they are converted to it.
        device: of the rank.
        folders: one among temporary files and one in shared memory, for the file.
    """
    names: dict[int, str] = {}
    for name, weight in weights.items():
        names.setdefault(weight.data_ptr(), name)
    own = {name: weights[name].detach() for name in names.values()}
    if way == "file":
        return _FileWeights({n: w.to("cpu", dtype).contiguous() for n, w in own.items()}, folders)
    # copies: the learner goes on, and a worker may have to be replaced
    kept = {n: torch.empty(w.shape, dtype=dtype, device=device).copy_(w) for n, w in own.items()}
    return _SharedWeights(kept) if way == "ipc" else _BroadcastWeights(kept)


def receive_weights(
    message: Mapping[str, Any], channel: Channel, device: torch.device, group: Group | None
) -> Iterator[tuple[str, Tensor]]:
    """The weights that the rank sends after `message`, in the worker."""
    if message["way"] == "file":
        yield from _read_weight_file(channel.receive_file())
    elif message["way"] == "ipc":
        for name, (rebuild, made_of) in pickle.loads(channel.receive_bytes()).items():
            parts = list(made_of)
            if rebuild is rebuild_cuda_tensor:
                parts[DEVICE] = device.index  # the same GPU has another number here
            yield name, rebuild(*parts)
    else:
        assert group is not None
        for name, dtype, shape in message["tensors"]:
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            group.broadcast([weight], FROM_RANK).wait()
            yield name, weight


def join_process_group(place: Path, rank: int, device: torch.device) -> Group:
    """Meets the other process of a pair in a file.

    Args:
        place: nobody has met there before.
        rank: 0 for the rank, 1 for its worker.
        device: of this process; both have one of the same kind.
    """
    store = FileStore(str(place), 2)
    kind: Any = dist.ProcessGroupGloo if device.type == "cpu" else dist.ProcessGroupNCCL
    group: Group = kind(store, rank, 2, PATIENCE)
    return group


class _FileWeights(PublishedWeights):
    """An open file, whole, that has lost its name: whoever is killed, nothing is left.

    It lies in shared memory where that has room for it, else among temporary files. A rank that is
    killed over it leaves the folder to its worker.
    """

    def __init__(self, weights: Mapping[str, Tensor], folders: tuple[Path, Path]) -> None:
        self.message = {"way": "file"}
        need = 2 * sum(weight.nbytes for weight in weights.values())
        shared = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > need
        folder = folders[shared]
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / "model.safetensors"
        try:
            save_file(dict(weights), path)
            self._file = path.open("rb")
        finally:
            path.unlink(missing_ok=True)

    def send(self, channel: Channel, group: Group | None) -> None:
        channel.send_file(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _read_weight_file(descriptor: int) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(f"/dev/fd/{descriptor}", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                yield name, file.get_tensor(name)
    finally:
        os.close(descriptor)


class _SharedWeights(PublishedWeights):
    """Tensors whose memory another process may map: what is sent are handles."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.message = {"way": "ipc"}
        self._weights = weights

    def send(self, channel: Channel, group: Group | None) -> None:
        handles = {name: reduce_tensor(weight) for name, weight in self._weights.items()}
        channel.send_bytes(ForkingPickler.dumps(handles))

    def close(self) -> None:
        self._weights = {}


class _BroadcastWeights(PublishedWeights):
    """Tensors of which a worker gets copies, in order."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = list(weights.values())
        told = [(n, str(w.dtype).removeprefix("torch."), w.shape) for n, w in weights.items()]
        self.message = {"way": "nccl", "tensors": told}

    def send(self, channel: Channel, group: Group | None) -> None:
        assert group is not None
        works = [group.broadcast([weight], FROM_RANK) for weight in self._weights]
        patience = 5.0  # its answer may come before the last broadcast is over here
        while not all(work.is_completed() for work in works):
            if channel.wait_for_message(0.01):
                time.sleep(0.01)
                patience -= 0.01
            if patience < 0:
                group.abort()  # it has ended, or says why it will
                return
        with suppress(RuntimeError):  # then there is no answer either, and that is looked after
            for work in works:
                work.wait()

    def close(self) -> None:
        self._weights = []
