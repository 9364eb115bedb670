"""CPU time and resident memory of processes, and what the parts of a piece of work need of both."""

import ctypes
import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

__all__ = ["PartMeter", "forget_peak", "read_kilobytes", "sum_tree_seconds"]


def sum_tree_seconds() -> float:
    """CPU seconds of all processes below this one so far, of those that have ended too."""
    me = psutil.Process()
    own = me.cpu_times()
    seconds = own.children_user + own.children_system
    for process in me.children(recursive=True):
        with suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])
    return float(seconds)


def read_kilobytes(field: str) -> int:
    """A size of this process by its name in /proc: VmRSS now, VmHWM at its highest."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def forget_peak() -> None:
    """Lets VmHWM begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a piece of work costs.

    Attributes:
        clock: seconds by the clock.
        cpu: CPU seconds of this process and of those below it.
        peak: MiB that this process held at the most beyond what it held before.
        kept: MiB that it holds afterwards beyond that.
        most: MiB that it held at the most in all.
    """

    clock: float
    cpu: float
    peak: float
    kept: float
    most: float


class PartMeter:
    """Measures the parts of a piece of work, one after the other."""

    def __init__(self) -> None:
        self.costs: dict[str, dict[str, float]] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Keeps the cost of the block under a name."""
        _return_freed_memory()
        before = read_kilobytes("VmRSS")
        forget_peak()
        cpu, clock = time.process_time() + sum_tree_seconds(), time.perf_counter()
        yield
        clock = time.perf_counter() - clock
        cpu = time.process_time() + sum_tree_seconds() - cpu
        most = read_kilobytes("VmHWM")
        _return_freed_memory()
        kept = (read_kilobytes("VmRSS") - before) / 1024
        peak = (most - before) / 1024
        self.costs[part] = asdict(Cost(clock, cpu, peak, kept, most / 1024))

    def watch_calls(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose last call is kept under a name."""

        def call(*arguments: Any, **named: Any) -> Any:
            with self.measure(part):
                return function(*arguments, **named)

        return call


def _return_freed_memory() -> None:
    """Returns what earlier parts have freed: reused, it would hide what the next one needs."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
