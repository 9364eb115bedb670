"""A short-lived cache for responses that many clients poll."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

__all__ = ["Memo"]

LEAST = 1.0
"""Minimum lifetime of a cached answer in seconds."""
SHARE = 25
"""Lifetime of a cached answer as a multiple of the time it took to compute."""
KEPT = 64


@dataclass(slots=True)
class _MemoEntry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: str = ""
    until: float = 0.0


class Memo:
    """Cache of answers by key; one thread at a time computes each, and the oldest are evicted.

    Computing an answer uses at most 1/`SHARE` of one core, however many clients poll it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _MemoEntry] = OrderedDict()

    def __call__(self, key: Hashable, answer: Callable[[], str]) -> str:
        """Returns the cached answer to `key`; recomputes it if it has expired."""
        with self._lock:
            kept = self._kept.setdefault(key, _MemoEntry())
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        with kept.lock:
            if time.monotonic() >= kept.until:
                began = time.monotonic()
                kept.value = answer()
                ended = time.monotonic()
                kept.until = ended + max(LEAST, SHARE * (ended - began))
            return kept.value
