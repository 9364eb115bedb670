"""Faster imports of large libraries, without optional dependencies that rlx never uses."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hide_packages", "speed_up_imports"]

BESIDE = ("mlflow", "pandas", "scipy", "sklearn")
"""Optional dependencies that transformers and DeepSpeed import if installed: for assisted
generation, for losses of other models, and for an autotuner."""


@contextmanager
def hide_packages(*names: str) -> Iterator[None]:
    """Blocks the import of `names` inside the block, except those already imported."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextmanager
def speed_up_imports() -> Iterator[None]:
    """Halves the import time of a process that imports everything it needs at once.

    Garbage collection is off inside the block. Imported objects live until the process ends, so
    are frozen and the garbage collector never scans them. Nothing is hidden once transformers has
    been imported, since it remembers which packages it has found.
    """
    beside = () if "transformers" in sys.modules else BESIDE
    collecting = gc.isenabled()
    gc.disable()
    try:
        with hide_packages(*beside):
            yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
