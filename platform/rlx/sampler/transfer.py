"""Transfers full weights from a rank to its vLLM worker, in one of three ways.

The rank sends a message that describes the weights, then the weights:

* `file`: one file in shared memory, on any machine;
* `ipc`: the rank's own copy on the GPU, which the worker reads in place (CUDA IPC);
* `nccl`: a broadcast to the worker's own GPU (on a CPU: Gloo).

Published weights are kept until the next transfer, so that a worker that replaces a killed one can
load them too.
"""

import os
import pickle
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
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
    "collect_weights",
    "drop_tied_weights",
    "join_process_group",
    "publish_weights",
    "read_weight_file",
    "receive_weights",
]

SHARED_MEMORY = Path("/dev/shm")
PATIENCE = timedelta(minutes=10)
DEVICE = 6
"""Position of the GPU index among the arguments of `rebuild_cuda_tensor`."""
FROM_RANK = dist.BroadcastOptions()
FROM_RANK.rootRank = 0

Group = dist.ProcessGroup
"""Process group of a rank (0) and its worker (1)."""


class PublishedWeights(ABC):
    """One version of the weights; tied weights are included once.

    Attributes:
        message: sent to the worker before the weights.
    """

    message: Mapping[str, Any]

    @abstractmethod
    def send(self, channel: Channel, group: Group | None) -> None:
        """Sends the weights to a worker that has received the message.

        Raises:
            EOFError, OSError: the worker is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases the weights."""


def collect_weights(
    way: str, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Copies weights as they come to where they are published from.

    A weight is let go before the next one comes: of weights that ranks gather, no more than one is
    whole at a time.

    Args:
        way: `file`, for which they are collected on the host, `ipc` or `nccl`.
        weights: by name, each once.
        dtype: weights are converted to it.
        device: device of the rank.
    """
    place, copies = torch.device("cpu") if way == "file" else device, {}
    for name, weight in weights:
        # Own ones, since the learner continues and a replaced worker needs the same version.
        copies[name] = weight.detach().to(place, dtype, copy=True).contiguous()
        del weight
    return copies


def publish_weights(
    way: str, weights: Mapping[str, Tensor], folders: tuple[Path, Path]
) -> PublishedWeights:
    """Publishes weights that nobody changes any more.

    Args:
        way: `file`, `ipc` or `nccl`.
        weights: from `collect_weights` for this way; tied weights may be listed once or twice.
        folders: a temporary folder and one in shared memory, for the file.
    """
    own = {name: weight.contiguous() for name, weight in drop_tied_weights(weights).items()}
    if way == "file":
        return _FileWeights(own, folders)
    return _SharedWeights(own) if way == "ipc" else _BroadcastWeights(own)


def drop_tied_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights that have no memory in common, each under its first name."""
    names: dict[int, str] = {}
    for name, weight in weights.items():
        names.setdefault(weight.data_ptr(), name)
    return {name: weights[name].detach() for name in names.values()}


def receive_weights(
    message: Mapping[str, Any], channel: Channel, device: torch.device, group: Group | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields, in the worker, the weights that the rank sends after `message`."""
    if message["way"] == "file":
        descriptor = channel.receive_file()
        try:
            yield from read_weight_file(f"/dev/fd/{descriptor}")
        finally:
            os.close(descriptor)
    elif message["way"] == "ipc":
        for name, (rebuild, handle) in pickle.loads(channel.receive_bytes()).items():
            arguments = list(handle)
            if rebuild is rebuild_cuda_tensor:
                arguments[DEVICE] = device.index  # the same GPU has another index in this process
            yield name, rebuild(*arguments)
    else:
        assert group is not None
        for name, dtype, shape in message["tensors"]:
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            group.broadcast([weight], FROM_RANK).wait()
            yield name, weight


def join_process_group(place: Path, rank: int, device: torch.device) -> Group:
    """Joins the process group of a rank and its worker through a file store.

    Args:
        place: path of the store; must not have been used before.
        rank: 0 for the rank, 1 for its worker.
        device: device of this process; both processes use the same kind.
    """
    store = FileStore(str(place), 2)
    kind: Any = dist.ProcessGroupGloo if device.type == "cpu" else dist.ProcessGroupNCCL
    group: Group = kind(store, rank, 2, PATIENCE)
    return group


class _FileWeights(PublishedWeights):
    """A complete file that is open but already unlinked, so that a killed process leaves nothing
    behind.

    It is in shared memory if there is room, otherwise in the temporary folder. If the rank is
    killed while writing, its worker removes the folder.
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


def read_weight_file(path: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a file."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            yield name, file.get_tensor(name)


class _SharedWeights(PublishedWeights):
    """Tensors whose memory another process can map; only handles are sent."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.message = {"way": "ipc"}
        self._weights = weights

    def send(self, channel: Channel, group: Group | None) -> None:
        handles = {name: reduce_tensor(weight) for name, weight in self._weights.items()}
        channel.send_bytes(ForkingPickler.dumps(handles))

    def close(self) -> None:
        self._weights = {}


class _BroadcastWeights(PublishedWeights):
    """Tensors that are broadcast to the worker, in order."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = list(weights.values())
        tensors = [(n, str(w.dtype).removeprefix("torch."), w.shape) for n, w in weights.items()]
        self.message = {"way": "nccl", "tensors": tensors}

    def send(self, channel: Channel, group: Group | None) -> None:
        assert group is not None
        works = [group.broadcast([weight], FROM_RANK) for weight in self._weights]
        patience = 5.0  # the worker may answer before the last broadcast completes here
        while not all(work.is_completed() for work in works):
            if channel.wait_for_message(0.01):
                time.sleep(0.01)
                patience -= 0.01
            if patience < 0:
                group.abort()  # the worker has ended, or its answer is an error
                return
        with suppress(RuntimeError):  # the caller detects the missing answer
            for work in works:
                work.wait()

    def close(self) -> None:
        self._weights = []
