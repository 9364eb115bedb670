"""Every exception that rlx raises on purpose, with the exit code of a command that ends with it.

Built-in exceptions (ValueError, TypeError) are for misuse of a single function.
"""

from typing import ClassVar


class RlxError(Exception):
    """Base class; by itself, a run failed, or rlx has a bug."""

    exit_code: ClassVar[int] = 1


class SpecError(RlxError):
    """The experiment spec, or an argument, asks for something impossible."""

    exit_code = 2


class PluginError(RlxError):
    """A plugin is missing, ambiguous or broken, or requires a newer rlx."""

    exit_code = 3


class EnvironmentFault(RlxError):
    """The machine lacks what the experiment needs."""

    exit_code = 4


class RegistryError(RlxError):
    """The run registry cannot be read or written."""

    exit_code = 5


class ShapeError(RlxError):
    """Two tensors disagree about a named dimension."""


class TreeError(RlxError):
    """A rollout tree is malformed."""


class RewardError(RlxError):
    """A reward plugin failed, and the spec sets `on_error: fail`."""


class DivergedModelError(RlxError):
    """A model's weights, or the logits that it computes, are not finite."""


def summarize_error(error: BaseException) -> str:
    """The first line of an exception's message, without a full stop; its type if it has none."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"cannot read {error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0].removesuffix(".")


OUT_OF_MEMORY_TEXTS = (
    "CUDA out of memory",  # torch's allocator (c10/cuda/CUDACachingAllocator.cpp)
    "CUDA error: out of memory",  # torch.AcceleratorError: graphs (c10/cuda/CUDAException.cpp)
    "CUDA driver error: out of memory",  # torch: expandable segments (c10/cuda/driver_api.h)
    "CUBLAS_STATUS_ALLOC_FAILED",  # torch: a handle of cuBLAS (ATen/cuda/Exceptions.h)
    "Cuda failure 2 'out of memory'",  # NCCL's last error, in torch.distributed.DistBackendError
    "Cuda failure 'out of memory'",  # the same of older NCCL (src/include/checks.h)
    "Triton Error [CUDA]: out of memory",  # a kernel of flex attention is loaded (driver.c)
)
"""What the errors say by which libraries report that a GPU has no free memory."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception was caused by a GPU without free memory: torch's allocator raises
    `torch.OutOfMemoryError`, others say it in a `RuntimeError`."""
    seen: set[int] = set()  # a cause may have been raised again because of what it caused
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kind = type(error)  # torch need not be imported here
        if kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] == "torch":
            return True
        if isinstance(error, RuntimeError) and any(t in str(error) for t in OUT_OF_MEMORY_TEXTS):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
