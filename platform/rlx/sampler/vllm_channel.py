"""Messages and weights between a rank and its vLLM worker.

Messages are JSON over a private pipe and never pickled, so receiving one runs no code. Weights are
one file, in shared memory where there is room. It is unlinked as soon as it is open, and only its
descriptor is sent: a killed process leaves nothing behind.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


def send_message(end: Connection, message: Mapping[str, Any]) -> None:
    """Sends a message as JSON.

    Raises:
        OSError: the other process is gone.
    """
    end.send_bytes(json.dumps(message).encode())


def receive_message(end: Connection) -> dict[str, Any]:
    """Waits for the next message.

    Raises:
        EOFError, OSError: the other process is gone.
    """
    message: dict[str, Any] = json.loads(end.recv_bytes())
    return message


def collect_weights(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies weights to the host's memory as they come, so that of weights that ranks gather no
    more than one is whole at a time.

    Args:
        weights: by name, each once.
        dtype: weights are converted to it.
    """
    copies = {}
    for name, weight in weights:
        # Copies, since the learner continues and a replaced worker needs the same version.
        copies[name] = weight.detach().to("cpu", dtype, copy=True).contiguous()
        del weight
    return copies


def drop_tied_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights that have no memory in common, each under its first name."""
    names: dict[int, str] = {}
    for name, weight in weights.items():
        names.setdefault(weight.data_ptr(), name)
    return {name: weights[name].detach() for name in names.values()}


class WeightFile:
    """One version of all weights as an open file without a name, kept until the next version.

    Args:
        weights: tied weights may be listed once or twice.
        folders: a temporary folder and one in shared memory, which is used if it has room. If the
            rank is killed while it writes, its worker removes them.
    """

    def __init__(self, weights: Mapping[str, Tensor], folders: tuple[Path, Path]) -> None:
        own = {name: weight.contiguous() for name, weight in drop_tied_weights(weights).items()}
        need = 2 * sum(weight.nbytes for weight in own.values())
        shared = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > need
        folder = folders[shared]
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / "model.safetensors"
        try:
            save_file(own, path)
            self._file = path.open("rb")
        finally:
            path.unlink(missing_ok=True)

    def send(self, end: Connection) -> None:
        """Sends the open file to a worker that waits for it."""
        reduction.send_handle(end, self._file.fileno(), 0)

    def close(self) -> None:
        """Gives the file's memory back, once no worker has it open."""
        self._file.close()


def read_weights(end: Connection) -> Iterator[tuple[str, Tensor]]:
    """Yields, in the worker, the weights of the file that the rank sends."""
    descriptor = reduction.recv_handle(end)
    try:
        with safe_open(f"/dev/fd/{descriptor}", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, file.get_tensor(name)
    finally:
        os.close(descriptor)
