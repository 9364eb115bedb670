"""A vLLM worker beside a rank on a mirrored GPU: a thread in the place of the process.

The rank's side is rlx's own: what is published, the channel, the process group. The worker receives
weights on the mirrored GPU by rlx's code too, and samples with them by transformers on the CPU;
when it sleeps it forgets them. vLLM itself, its memory and its own kernels are not shown.

CUDA IPC and NCCL are mirrored: a handle names a tensor of this process; a broadcast goes through
Gloo, but takes no tensor of the host. A tensor of the host can be shared, as torch does it, but
does not arrive on the GPU.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mirrored_gpu import MirrorTensor, Placement, unmirror
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlx.model import PlainDialogue, Policy, pretrained_tokenizer
from rlx.rollout import CompletionRequest
from rlx.sampler import TransformersSampler, transfer, vllm_engine
from rlx.sampler.channel import Channel
from rlx.sampler.transfer import join_process_group, receive_weights
from rlx.sampler.vllm_process import WorkerProcess
from rlx.sampler.vllm_serving import serve
from rlx.spec import TurnSpec

__all__ = ["mirror_transfer", "mirror_vllm"]

LEAVING = 1.0
"""Seconds until a worker is left to itself, which waits for a broadcast that never comes."""
PATIENCE = timedelta(seconds=30)
"""After which it ends."""
SHARED: dict[int, Tensor] = {}
"""Tensors whose handles were sent; a rank keeps what it has published."""


def share_tensor(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """`reduce_tensor`, which gives a handle of memory on the device."""
    if not isinstance(tensor, MirrorTensor):
        shared: tuple[Any, tuple[Any, ...]] = reduce_tensor(tensor)
        return shared
    SHARED[id(tensor)] = tensor
    return open_handle, (None,) * 5 + (id(tensor), None)


def open_handle(*handle: Any) -> Tensor:
    """`rebuild_cuda_tensor`, which the worker tells the number of its GPU."""
    assert handle[transfer.DEVICE] == 0, "on which GPU?"
    return SHARED.pop(handle[5])


class MirroredNccl:
    """A process group of NCCL."""

    def __init__(self, *arguments: Any) -> None:
        self._group = dist.ProcessGroupGloo(*arguments)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        if not all(isinstance(tensor, MirrorTensor) for tensor in tensors):
            raise ValueError("Tensors must be CUDA and dense")
        return self._group.broadcast([unmirror(tensor) for tensor in tensors], options)

    def abort(self) -> None:
        self._group.abort()


@contextmanager
def mirror_transfer() -> Iterator[None]:
    """Context manager within `mirror_gpu`: weights go to a worker as on a machine with GPUs."""
    with (
        patch.object(transfer, "PATIENCE", PATIENCE),
        patch.object(transfer, "reduce_tensor", share_tensor),
        patch.object(transfer, "rebuild_cuda_tensor", open_handle),
        patch.object(dist, "ProcessGroupNCCL", MirroredNccl, create=True),
        patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ):
        yield


class ThreadWorker:
    """What a worker does; see `rlx.sampler.vllm_serving.RowGenerator`."""

    version, takes_adapter, can_begin = None, False, True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        folder, self._device = Path(settings["folder"]), torch.device("cuda", 0)
        config = AutoConfig.from_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config).to(getattr(torch, settings["dtype"]))
        tokenizer, ends = pretrained_tokenizer(folder), tuple(settings["end_ids"])
        policy = Policy(model, tokenizer, PlainDialogue(tokenizer, ends), ends)
        here = torch.device("cpu")
        self._sampler = TransformersSampler(policy, max_rows=settings["max_rows"], device=here)
        self._model, self._group = model, None
        self._answers: list[tuple[Channel, dict[str, Any]]] = []
        self._forget()

    def _forget(self) -> None:
        with torch.no_grad():
            for weight in self._model.parameters():
                weight.fill_(torch.nan)

    @property
    def is_generating(self) -> bool:
        return bool(self._answers)

    def answer(self, message: Mapping[str, Any], channel: Channel) -> dict[str, Any]:
        if message["ask"] == "sleep":
            self._forget()
            return {}
        assert message["ask"] == "load"
        if message["way"] == "nccl" and self._group is None:
            self._group = join_process_group(Path(message["place"]), 1, self._device)
        arrived = dict(receive_weights(message, channel, self._device, self._group))
        kinds = {weight.device.type for weight in arrived.values()}
        assert kinds == {"cpu" if message["way"] == "file" else "cuda"}, "weights took a detour"
        self._sampler.load(
            {n: unmirror(w) if isinstance(w, MirrorTensor) else w for n, w in arrived.items()}
        )
        return {}

    def begin(self, message: Mapping[str, Any], channel: Channel) -> None:
        rows, sampling = message["rows"], TurnSpec(**message["sampling"])
        requests = [CompletionRequest(tuple(context), None, (seed,)) for context, seed in rows]
        with self._sampler.session() as session:
            groups = session.generate(requests, sampling)
        found = [
            (one.token_ids, one.logprobs, one.finish_reason, [(len(one.token_ids), None)])
            for (one,) in groups
        ]
        self._answers.append((channel, {"rows": found}))

    def step(self) -> Iterator[tuple[Channel, dict[str, Any]]]:
        answers, self._answers = self._answers, []
        yield from answers


def work(channel: Channel) -> None:
    """Answers the rank until it hangs up, or something fails."""
    try:
        worker = ThreadWorker(settings := channel.receive())
        channel.send({"longest": settings["max_length"] or 4096})
        with Placement(), torch.inference_mode():
            serve(worker, channel)
    except EOFError:
        return
    except Exception as error:
        with suppress(OSError):  # or it has left
            channel.send({"error": f"{type(error).__name__}: {error}"})


class WorkerThread(WorkerProcess):
    """Has a thread where a rank has a process."""

    def __init__(self, environment: Any, folders: Any, device: torch.device) -> None:
        ours, theirs = Pipe()
        self._channel, self._folders, self._device = Channel(ours), folders, device
        self._group = None
        self._thread = Thread(target=work, args=(Channel(theirs),), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._channel.hang_up()
        self._thread.join(LEAVING)
        self._channel.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def mirror_vllm() -> Iterator[None]:
    """Context manager within `mirror_gpu`: ranks have such a worker."""
    with (
        mirror_transfer(),
        patch.object(vllm_engine, "require_vllm", lambda: None),
        patch.object(vllm_engine, "WorkerProcess", WorkerThread),
    ):
        yield
