"""Importing large libraries without what they would import beside, and nobody here calls."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hide_packages", "speed_up_imports"]

BESIDE = ("mlflow", "pandas", "scipy", "sklearn")
"""What transformers and DeepSpeed import where they find it: for assisted generation, for losses
of other models, and for an autotuner."""


@contextmanager
def hide_packages(*names: str) -> Iterator[None]:
    """Keeps packages that are not there yet from being imported by what the block imports."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextmanager
def speed_up_imports() -> Iterator[None]:
    """For a process that imports all that it needs at once: in half the time.

    What is imported stays until the process ends, so nobody looks for garbage in it, ever.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with hide_packages(*BESIDE):
            yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
