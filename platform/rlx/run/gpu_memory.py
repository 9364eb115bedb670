"""Peak memory of a GPU by stage of a step, as metrics beside what `rlx plan` expects; and what held
it when there was none left."""

import pickle
from pathlib import Path

import torch

__all__ = ["GpuPeaks", "record_allocations", "write_memory_snapshot"]


class GpuPeaks:
    """Reads the peak of each stage; nothing on a CPU.

    Args:
        device: the rank's device.

    Attributes:
        figures: by the metric's name, GiB that torch had allocated at the peak of the stage, GiB
            that it held in reserve with them, and how often it had to empty its cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.figures: dict[str, float] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def end(self, stage: str) -> None:
        """Ends a stage, and begins the next one."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            held = torch.cuda.max_memory_reserved(self._device)
            retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)
            self.figures[f"perf/memory_{stage}_gib"] = peak / 2**30
            self.figures[f"perf/memory_reserved_{stage}_gib"] = held / 2**30
            self.figures["perf/memory_retries"] = float(retries)
            torch.cuda.reset_peak_memory_stats(self._device)


def record_allocations() -> None:
    """Has torch remember which line of Python allocated the memory that is in use."""
    torch.cuda.memory._record_memory_history("state", context="state", stacks="python")


def write_memory_snapshot(path: Path) -> None:
    """Writes what holds this process's GPU memory, as https://pytorch.org/memory_viz reads it.

    Without `record_allocations` it has sizes alone.
    """
    path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
