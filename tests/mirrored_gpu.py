"""A GPU for machines without one: CPU tensors that say they are on `cuda:0`.

Everything computes on the CPU with real values. Below autograd every operation is looked at:

* an operation that mixes the "GPU" with a CPU tensor raises, as CUDA does;
* what waits for the device (`item`, `tolist`, `cpu`, `nonzero`, boolean indices, ...) is counted by
  the line of rlx that asks for it, and so are copies from pageable memory of the host;
* sums that CUDA adds in another order every time are counted where an index is repeated;
* `torch.cuda.CUDAGraph` records operations and computes them again on the same memory. A capture
  forbids what CUDA forbids: waits, copies from the host, the default stream, and in the mode
  `global` also the waits of other threads. What a capture "computes" is undone or overwritten with
  NaN, so a result that is read before the first replay shows.

`mirrored_deepspeed.py` trains there with DeepSpeed itself, under every ZeRO stage, and has what is
only needed for that.

A module that is moved there gets new parameters; ties stay. What is pickled loads as CPU tensors.

It does not show: kernels that CUDA lacks for a dtype or shape, memory (also memory that a graph
uses after its owner has freed it), order between streams, flex attention, NCCL, and speed.
"""

import inspect
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["CUDA", "MirrorTensor", "MirroredGpu", "mirror_gpu", "mutate"]

CUDA = torch.device("cuda", 0)
SOURCES = str(Path(__file__).parents[1] / "platform")

WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operations whose result, or whose shape, the host must know."""
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
COPYING = {"copy_", "_to_copy", "set_"}
ADDING = {"index_add", "index_add_", "scatter_add", "scatter_add_"}
ALLOCATING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


class MirroredGpu:
    """What has happened on the device.

    Attributes:
        waits: by the source line that waits.
        copies: copies from pageable memory of the host, which wait, by source line.
        unordered: sums by repeated index with atomic operations, by source line.
        launches: kernels that would have been launched one by one; a replay is one.
        replays: replayed graphs.
        graphs: the captured graphs.
        beside_captures: called in another thread during every capture, as a learner would work
            while the sampler captures.
    """

    def __init__(self) -> None:
        self.reset()
        self.capturing: dict[int, MirrorGraph] = {}
        self.streams: dict[int, MirrorStream | None] = {}
        self.beside_captures: Callable[[], object] | None = None

    def reset(self) -> None:
        """Forgets what was counted."""
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.unordered: Counter[str] = Counter()
        self.launches = self.replays = 0
        self.graphs: list[MirrorGraph] = []

    @property
    def own_capture(self) -> "MirrorGraph | None":
        """The graph that this thread captures."""
        return self.capturing.get(threading.get_ident())

    def wait(self, what: str) -> None:
        """Something waits for the device."""
        self.waits[f"{find_source_line()} {what}"] += 1
        self._forbid(what)

    def copy(self, what: str) -> None:
        """Something is copied from pageable host memory."""
        self.copies[f"{find_source_line()} {what}"] += 1
        self._forbid(what)

    def _forbid(self, what: str) -> None:
        if self.own_capture is not None:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what}, "
                f"{find_source_line()})"
            )
        for graph in list(self.capturing.values()):
            if graph.mode == "global":
                graph.is_broken = True
                raise RuntimeError(
                    f"CUDA error: {what} would make the capture of another thread unsafe"
                )


GPU = MirroredGpu()


def find_source_line() -> str:
    """The innermost line of rlx that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCES):
            name = Path(frame.f_code.co_filename).relative_to(SOURCES)
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def mirror(value: Any) -> Any:
    """The same memory, as a tensor of the GPU."""
    if isinstance(value, Tensor) and not isinstance(value, MirrorTensor):
        return torch.Tensor._make_subclass(MirrorTensor, value, False)
    return value


def unmirror(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor of the CPU without gradient."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor._make_subclass(torch.Tensor, tensor, False)


class MirrorTensor(torch.Tensor):
    """A CPU tensor that says it is on the GPU."""

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        graph = GPU.own_capture
        if graph is not None:
            graph.keep_written(func, args)
        inspect_operation(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
        out = tree_map(mirror, out)
        if graph is not None:
            graph.record(func, args, kwargs, out)
        return out

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def get_device(self):
        return 0

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def tolist(self):
        GPU.wait("tolist")
        return unmirror(self).tolist()

    def item(self):  # on the CPU, numbers are read past the dispatcher
        GPU.wait("item")
        return unmirror(self).item()

    def __int__(self):
        return int(self.item())

    def __float__(self):
        return float(self.item())

    def __bool__(self):
        return bool(self.item())

    __index__ = __int__

    def cpu(self, *_, **__):
        return move(self, torch.device("cpu"))

    def cuda(self, *_, **__):
        return self

    def to(self, *args, **kwargs):
        return convert(self, args, kwargs)

    def record_stream(self, _): ...

    def __reduce_ex__(self, protocol):
        return unmirror(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            new = mirror(unmirror(self).clone())
            if getattr(self, "_is_param", False):
                new = torch.nn.Parameter(new, self.requires_grad)
            memo[id(self)] = new.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __repr__(self, **_):
        return f"cuda:0 {unmirror(self)!r}"


def inspect_operation(func: Any, args: Any, kwargs: Any) -> None:
    """Raises what CUDA would; counts launches, waits and copies."""
    name = func.overloadpacket.__name__
    tensors = [t for t in tree_flatten(args)[0] if isinstance(t, Tensor)]
    on_host = [t for t in tensors if not isinstance(t, MirrorTensor)]
    if name in WAITING:
        GPU.wait(name)
    elif name == "repeat_interleave" and "ensor" in func._overloadname:
        if kwargs.get("output_size") is None:  # how long the result is, only the device knows
            GPU.wait(name)
    elif name in INDEXING:
        inspect_indexing(name, args)
    elif any(t.dim() for t in on_host) and name not in COPYING:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! ({name}, {find_source_line()})"
        )
    elif name == "copy_" and any(t.dim() for t in on_host):
        (GPU.copy if isinstance(args[0], MirrorTensor) else GPU.wait)("copy_")
    if name in ADDING and repeats_index(*args[1:3]):
        GPU.unordered[f"{find_source_line()} {name}"] += 1
    if name not in ALLOCATING:
        GPU.launches += 1


def repeats_index(dim: int, index: Tensor) -> bool:
    with torch._C._DisableTorchDispatch():
        ordered = unmirror(index).sort(dim).values
        return bool((ordered.diff(dim=dim) == 0).any())


class PinnedTensor(torch.Tensor):
    """A CPU tensor in pinned memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def pin_memory(tensor: Tensor, *_: object) -> Tensor:
    """A copy in pinned memory, which only a machine with a GPU has."""
    assert not isinstance(tensor, MirrorTensor)
    return torch.Tensor._make_subclass(PinnedTensor, tensor.clone(), False)


def inspect_indexing(name: str, args: Any) -> None:
    """Indices may be on the host, at the price of a copy; values may not, but for numbers."""
    if not isinstance(args[0], MirrorTensor):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor (cpu), "
            f"{find_source_line()}"
        )
    for index in args[1] or []:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            GPU.wait("boolean index")
        elif isinstance(index, Tensor) and not isinstance(index, MirrorTensor):
            GPU.copy("index on the host")
    value = args[2] if len(args) > 2 else None
    if isinstance(value, Tensor) and not isinstance(value, MirrorTensor):
        if value.dim():
            raise RuntimeError(f"index_put_: values are on cpu, {find_source_line()}")
        GPU.wait("a number copied through indices")


class ToHost(torch.autograd.Function):
    @staticmethod
    def forward(_, tensor):
        return unmirror(tensor).clone()

    @staticmethod
    def backward(_, gradient):
        return mirror(gradient)


class ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(_, tensor):
        return mirror(tensor.detach().clone())

    @staticmethod
    def backward(_, gradient):
        return unmirror(gradient)


def move(tensor: Tensor, device: torch.device, *, waits: bool = True) -> Tensor:
    """A copy on another device; the tensor itself where it is there already. The host does not
    wait for a copy from pinned memory that is asked not to block."""
    is_there = isinstance(tensor, MirrorTensor)
    if is_there == (device.type == "cuda"):
        return tensor
    follows = tensor.requires_grad and torch.is_grad_enabled()
    if is_there:
        GPU.wait("cpu")
        return ToHost.apply(tensor) if follows else unmirror(tensor).clone()
    if tensor.numel() and (waits or not isinstance(tensor, PinnedTensor)):
        GPU.copy("to the device")
    if follows and not tensor.is_leaf:
        return ToDevice.apply(tensor)
    return mirror(tensor.detach().clone())


def convert(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`Tensor.to`: the device first, then the dtype."""
    given = tensor
    named = {k: v for k, v in kwargs.items() if k in ("device", "dtype") and v is not None}
    for value in args:
        if isinstance(value, Tensor):
            named |= {"device": value.device, "dtype": value.dtype}
        elif isinstance(value, torch.dtype):
            named["dtype"] = value
        elif isinstance(value, str | torch.device):
            named["device"] = torch.device(value)
    if "device" in named:
        waits = not kwargs.get("non_blocking", False)
        tensor = move(tensor, torch.device(named["device"]), waits=waits)
    if "dtype" in named:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = torch.Tensor.to(tensor, named["dtype"])
    return tensor.clone() if kwargs.get("copy") and tensor is given else tensor


class Placement(TorchFunctionMode):
    """Factories with `device="cuda"`, and moves of CPU tensors.

    While torch runs a function, it asks no mode about what this one calls: `run_backward` asks
    again, for the hooks of a backward pass.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            return convert(args[0], args[1:], kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return move(args[0], CUDA if func is torch.Tensor.cuda else torch.device("cpu"))
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        kwargs["device"] = torch.device("cpu")
        if func is torch.tensor:
            GPU.copy("torch.tensor")
        with torch._C._DisableTorchDispatch():
            out = mirror(func(*map(plain_argument, args), **kwargs))
        if (graph := GPU.own_capture) is not None:
            graph.record(func, args, kwargs, out)
        GPU.launches += 1
        return out


_run_backward = torch.autograd._engine_run_backward


def run_backward(*args: Any, **kwargs: Any) -> Any:
    """A backward pass, whose hooks may make tensors, and recompute layers."""
    with Placement():
        return _run_backward(*args, **kwargs)


def convert_module(module: nn.Module, change: Callable[[Tensor], Tensor], _: bool = True) -> Any:
    """`nn.Module._apply`: a parameter that changes its device is another one, but only once."""
    changed: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None and id(old) not in changed:
                with torch.no_grad():
                    value = change(old)
                changed[id(old)] = old
                if isinstance(value, MirrorTensor) != isinstance(old, MirrorTensor):
                    changed[id(old)] = nn.Parameter(value, old.requires_grad)
                elif value is not old:
                    old.data = value
            if old is not None:
                part._parameters[name] = changed[id(old)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = change(buffer)
    return module


def plain_argument(value: Any) -> Any:
    return unmirror(value) if isinstance(value, MirrorTensor) else value


class MirrorStream:
    """A stream that is not the default one; work on it is in order with everything else."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    def wait_stream(self, _: "MirrorStream") -> None: ...
    def wait_event(self, _: "MirrorEvent") -> None: ...
    def synchronize(self) -> None:
        GPU.wait("synchronize")


class MirrorEvent:
    """An event that has happened when it is recorded."""

    def __init__(self, **_: bool) -> None: ...
    def record(self, _: MirrorStream | None = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        GPU.wait("synchronize")


DEFAULT_STREAM = MirrorStream()


@contextmanager
def use_stream(stream: "MirrorStream | None") -> Iterator[None]:
    thread = threading.get_ident()
    before, GPU.streams[thread] = GPU.streams.get(thread), stream
    try:
        yield
    finally:
        GPU.streams[thread] = before


class MirrorGraph:
    """Records operations, and computes them again on the same memory."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.written: dict[int, tuple[Any, Any]] = {}
        self.made: list[Tensor] = []
        self.mode, self.is_broken = "", False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        thread = threading.get_ident()
        if GPU.streams.get(thread) in (None, DEFAULT_STREAM):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if GPU.capturing:
            raise RuntimeError("another capture is under way")
        self.mode, GPU.capturing[thread] = capture_error_mode, self
        if GPU.beside_captures is not None:
            other = threading.Thread(target=GPU.beside_captures)
            other.start()
            other.join()

    def capture_end(self) -> None:
        del GPU.capturing[threading.get_ident()]
        for storage, before in self.written.values():
            storage.copy_(before)
        for tensor in self.made:
            if tensor.dtype.is_floating_point:
                unmirror(tensor).fill_(torch.nan)
        if self.is_broken:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        GPU.graphs.append(self)

    def keep_written(self, func: Any, args: Any) -> None:
        """Keeps the memory that an operation will write: a capture computes nothing."""
        ours = {t.untyped_storage().data_ptr() for t in self.made}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            alias = argument.alias_info
            if alias is not None and alias.is_write and isinstance(value, Tensor):
                with torch._C._DisableTorchDispatch():
                    storage = value.untyped_storage()
                    if storage.data_ptr() not in ours:
                        self.written.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.operations.append((func, args, kwargs, out))
        given = {
            t.untyped_storage().data_ptr() for t in tree_flatten(args)[0] if isinstance(t, Tensor)
        }
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.made.append(tensor)

    def replay(self) -> None:
        GPU.launches += 1
        GPU.replays += 1
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for func, args, kwargs, out in self.operations:
                again = func(*args, **kwargs)
                for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        unmirror(old).copy_(unmirror(new))


def _set_device(_: Any) -> None:
    """Rank threads choose their device first; factories are then looked at there too."""
    if threading.current_thread() is not threading.main_thread():
        Placement().__enter__()


REPLACED: dict[str, Any] = {
    "CUDAGraph": MirrorGraph,
    "Event": MirrorEvent,
    "Stream": MirrorStream,
    "stream": use_stream,
    "current_stream": lambda *_: DEFAULT_STREAM,
    "default_stream": lambda *_: DEFAULT_STREAM,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _set_device,
    "synchronize": lambda *_: GPU.wait("synchronize"),
    "empty_cache": lambda: None,
    "mem_get_info": lambda *_: (60 << 30, 80 << 30),
    "memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "max_memory_reserved": lambda *_: 0,
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "get_device_name": lambda *_: "mirror",
    "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, total_memory=80 << 30),
    "is_bf16_supported": lambda *_: True,
    "nvtx": SimpleNamespace(),
}


@contextmanager
def mirror_gpu() -> Iterator[MirroredGpu]:
    """Context manager: this process has a GPU."""
    GPU.__init__()  # type: ignore[misc]
    with (
        patch.multiple(torch.cuda, **REPLACED),
        patch.object(nn.Module, "_apply", convert_module),
        patch.object(torch.autograd, "_engine_run_backward", run_backward),
        patch.object(torch.Tensor, "pin_memory", pin_memory),
        Placement(),
    ):
        yield GPU


def mutate(owner: Any, name: str, old: str, new: str) -> Any:
    """The function or method `name` of a module or class, with `old` replaced in its source."""
    function = inspect.getattr_static(owner, name)
    plain = inspect.unwrap(getattr(function, "__func__", function))
    source = textwrap.dedent(inspect.getsource(plain))
    assert source.count(old) == 1, f"{name} does not contain {old!r} once"
    namespace: dict[str, Any] = {}
    globals_ = plain.__globals__
    exec(compile(source.replace(old, new), f"<mutant of {name}>", "exec"), globals_, namespace)
    return namespace[plain.__name__]
