"""How a GPU without free memory is told from a bug, whichever library says so."""

__all__ = ["is_out_of_memory"]

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
    """Whether an exception was caused by a GPU without free memory.

    Only torch's allocator raises `torch.OutOfMemoryError`; others say it in a `RuntimeError`.
    """
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
