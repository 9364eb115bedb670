"""Compiles flex attention's kernels for a GPU of sm_90 (H100, H200) on a machine without one.

    python tests/gpu/compile_kernels.py [--heads 12 --kv-heads 2 --head-dim 128] [--dtype bfloat16]

The learner's flex form is run on the CPU, forward and backward, so that its graphs are those of
rlx. Each is then lowered by torch's compiler, and compiled by Triton to machine code, as if the
tensors were on the GPU: nothing is run there. Prints shared memory and spills of every kernel, and
exits with 1 if one cannot be compiled or needs more shared memory than the GPU has.

A torch without CUDA will do; Triton is needed. What cannot be compiled is printed with the reason.
"""

import argparse
import copy
import importlib.util
import os
import sys
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from shapes import Shape, train_batch

SHARED_MEMORY = 232_448
"""Bytes that a block of an sm_90 GPU may have."""
CAPABILITY, CUDA = (9, 0), torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(
    name="sm_90", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block_optin=SHARED_MEMORY, shared_memory_per_multiprocessor=233_472,
    regs_per_multiprocessor=65_536, shared_memory_per_block=49_152, L2_cache_size=50 << 20,
    gcnArchName="",
)  # fmt: skip
SHAPE = Shape(1, 60, 40, 30, 12, answers=4, confidences=2)
"""Of the trees that are packed: some 700 tokens."""


class AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return CUDA


class NoDevice:
    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


def skip_copy(permute: Any, out: torch.Tensor, query_strides: tuple[int, ...]) -> torch.Tensor:
    """Torch's `_permute_strides` of a fake tensor: a torch without CUDA cannot copy even these."""
    with patch.object(torch.Tensor, "copy_", lambda tensor, *_: tensor):
        permuted: torch.Tensor = permute(out, query_strides)
    return permuted


def pretend_gpu(stack: ExitStack) -> None:
    """Torch's compiler is told of a GPU until the stack closes."""
    from torch._dynamo.device_interface import CudaInterface

    operators = import_module("torch._higher_order_ops.flex_attention")
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.runtime import driver

    nothing, number, yes = lambda *_, **__: None, lambda *_, **__: 0, lambda *_, **__: True
    told: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "get_device_properties": lambda *_: PROPERTIES,
            "get_device_capability": lambda *_: CAPABILITY,
            "is_available": yes,
            "device_count": lambda: 1,
            "current_device": number,
            "is_bf16_supported": yes,
            "_lazy_init": nothing,
            "_get_device_properties": lambda *_: PROPERTIES,
            "synchronize": nothing,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": nothing,
            "device": NoDevice,
            "_DeviceGuard": NoDevice,
        },
        CudaInterface: {
            "is_available": staticmethod(yes),
            "current_device": staticmethod(number),
            "get_compute_capability": staticmethod(lambda *_: 90),
            "set_device": staticmethod(nothing),
            "exchange_device": staticmethod(number),
            "maybe_exchange_device": staticmethod(number),
            "get_raw_stream": staticmethod(number),
            "is_triton_capable": staticmethod(yes),
            "raise_if_triton_unavailable": staticmethod(nothing),
        },
        CudaInterface.Worker: {
            "current_device": staticmethod(number),
            "get_device_properties": staticmethod(lambda *_: PROPERTIES),
            "set_device": staticmethod(nothing),
        },
        triton_helpers: {"set_driver_to_gpu": nothing, "set_driver_to_cpu": nothing},
        triton_heuristics.CachingAutotuner: {"_make_launchers": nothing},
        operators: {"_permute_strides": partial(skip_copy, operators._permute_strides)},
        torch._C: {"_cuda_getCurrentRawStream": number},
        import_module("torch._inductor.scheduler"): {"has_triton": yes},
        type(driver): {"active": AbsentGpu()},
    }
    for owner, attributes in told.items():
        for name, value in attributes.items():
            stack.enter_context(patch.object(owner, name, value, create=True))


class Kernels:
    """Compiles graphs of the CPU for the GPU, and writes down what comes of it.

    Attributes:
        compiled: name, bytes of shared memory, spills.
        failures: what could not be compiled, and why.
    """

    def __init__(self) -> None:
        self.compiled: list[tuple[str, int, int]] = []
        self.failures: list[str] = []
        self._where = ""

    def compile(self, compile_kernel: Any, source: Any, **options: Any) -> Any:
        """Triton's compiler, and a row of the report."""
        kernel = compile_kernel(source, **options)
        row = (f"{self._where}: {kernel.metadata.name}", kernel.metadata.shared)
        self.compiled.append((*row, kernel.asm.get("ptx", "").count("st.local")))
        name, shared, spills = self.compiled[-1]
        print(f"{name}: {shared} B shared, {spills} spills", flush=True)
        return kernel

    def lower(self, graph: Any, inputs: Any, *, backward: bool) -> Any:
        """Lowers a copy of a graph; returns what computes the graph on the CPU."""
        from functorch.compile import make_boxed_func
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.utils import BoxedBool

        self._where = "backward" if backward else "forward"
        try:
            with ExitStack() as stack:
                pretend_gpu(stack)
                moved, there = move_graph(graph, inputs)
                compile_fx_inner(moved, there, is_backward=backward, cudagraphs=BoxedBool(False))
        except Exception as error:
            why = str(error).strip().splitlines() or [""]
            self.failures.append(f"{self._where}: {type(error).__name__}: {why[0]}")
        return make_boxed_func(graph.forward)


def move_graph(graph: Any, inputs: Any) -> tuple[Any, list[Any]]:
    """A copy of a graph, and its inputs, whose tensors are on the GPU."""
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_map

    mode, moved = detect_fake_mode(inputs), copy.deepcopy(graph)

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda:0")

    with mode:
        for part in moved.modules():
            if not isinstance(part, torch.fx.GraphModule):
                continue
            for node in part.graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": CUDA}
                for key in {"val", "example_value"} & node.meta.keys():
                    node.meta[key] = tree_map(move, node.meta[key])
            part.recompile()
        return moved, [move(value) for value in inputs]


def learn(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Runs the flex form on the CPU, forward and backward."""
    from rlx.learner.forms import FlexForm
    from rlx.learner.forward import PackedPolicy
    from rlx.learner.pack import collate_trees, pack_trees
    from rlx.model import build_policy
    from rlx.spec import TinyModelSpec

    size = TinyModelSpec(
        hidden_size=64, heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=1
    )
    module = PackedPolicy(build_policy(size, 0, dtype=dtype).model.eval())
    module.use(FlexForm())
    batch = train_batch(SHAPE, 100)
    rows = batch.batch
    trees = pack_trees(rows.token_ids, rows.is_token, rows.tree_ids, batch.wanted, 10**6)
    packed = collate_trees(trees, rows.token_ids)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            logprobs, _ = module(packed, torch.ones(len(packed.targets)))
            if grad:
                logprobs.sum().backward()


def main() -> int:
    """Compiles, prints, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        print("missing: triton is not installed")
        return 1
    import triton
    import triton.compiler.compiler
    from torch._dynamo.backends.common import aot_autograd
    from torch.nn.attention import flex_attention

    kernels, compiled, compile_kernel = Kernels(), torch.compile, triton.compiler.compiler.compile
    forward = partial(kernels.lower, backward=False)
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=partial(kernels.lower, backward=True),
        inference_compiler=forward,
    )

    def compile_flex(function: Any = None, **named: Any) -> Any:
        if function is flex_attention.flex_attention:
            named = {"backend": backend}
        return compiled(function, **named)

    noted = partial(kernels.compile, compile_kernel)
    with ExitStack() as stack:
        for owner in (triton, triton.compiler, triton.compiler.compiler):
            stack.enter_context(patch.object(owner, "compile", noted))
        stack.enter_context(patch.object(flex_attention, "_validate_device", lambda *_: None))
        stack.enter_context(patch.object(torch, "compile", compile_flex))
        dtype = getattr(torch, options.dtype)
        learn(options.heads, options.kv_heads, options.head_dim, dtype)
    for failure in kernels.failures:
        print(f"not compiled: {failure}")
    large = [name for name, shared, _ in kernels.compiled if shared > SHARED_MEMORY]
    for name in large:
        print(f"too much shared memory: {name}")
    print(f"{len(kernels.compiled)} kernels compiled for sm_90")
    return 1 if kernels.failures or large or not kernels.compiled else 0


if __name__ == "__main__":
    sys.exit(main())
