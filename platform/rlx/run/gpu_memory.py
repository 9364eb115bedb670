"""Peak memory of a GPU by stage of a step, as metrics beside what `rlx plan` expects."""

import torch

__all__ = ["GpuPeaks"]


class GpuPeaks:
    """Reads the peak of each stage; nothing on a CPU.

    Args:
        device: the rank's device.

    Attributes:
        figures: by the metric's name, GiB that torch had allocated at the peak of the stage.
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
            self.figures[f"perf/memory_{stage}_gib"] = peak / 2**30
            torch.cuda.reset_peak_memory_stats(self._device)
