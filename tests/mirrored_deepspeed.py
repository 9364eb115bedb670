"""DeepSpeed on a mirrored GPU, on one rank: its own engine, under every ZeRO stage.

It takes its code for CUDA, but for two things that need the device: the process group is Gloo's,
and the optimizer is not fused, since the fused one has kernels of its own for a GPU. Under ZeRO 3
all weights are moved to the device first, and not one by one. Pinned memory is memory.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from mirrored_gpu import CUDA, MirrorTensor
from torch import Tensor

__all__ = ["train_on_mirror"]

INIT, ADAMW = deepspeed.zero.Init, torch.optim.AdamW


class MirroredInit(INIT):
    """Shards weights of the device: on the host they have another type, which they keep."""

    def __init__(self, module: Any = None, **options: Any) -> None:
        if module is not None:
            module.to(CUDA)
        super().__init__(module=module, **options)


class UnfusedAdamW(ADAMW):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{**options, "fused": False, "foreach": False})


class MirroredAccelerator(CUDA_Accelerator):
    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        assert not isinstance(tensor, MirrorTensor), "only memory of the host can be pinned"
        return tensor


@contextmanager
def train_on_mirror() -> Iterator[None]:
    """Context manager within `mirror_gpu`: DeepSpeed computes on the mirrored GPU, on one rank."""
    before = get_accelerator()
    set_accelerator(MirroredAccelerator())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            patch.object(deepspeed.zero, "Init", MirroredInit),
            patch.object(torch.optim, "AdamW", UnfusedAdamW),
            patch.dict(os.environ, {"LOCAL_RANK": "0"}),
        ):
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
            yield
    finally:
        deepspeed.comm.destroy_process_group()
        deepspeed.comm.comm.cdb = None
        set_accelerator(before)
