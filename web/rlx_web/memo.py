"""What many clients ask for again and again is worked out once."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

__all__ = ["Memo"]

LEAST = 1.0
"""Seconds for which an answer stands at least."""
SHARE = 25
"""An answer stands for so many times the time it took: pollers cost at most a part of a core."""
KEPT = 64


@dataclass(slots=True)
class _MemoEntry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: str = ""
    until: float = 0.0


class Memo:
    """Answers by key, each worked out by one thread at a time; the oldest are forgotten.

    An answer costs at most 1/`SHARE` of one core, however many ask for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _MemoEntry] = OrderedDict()

    def __call__(self, key: Hashable, answer: Callable[[], str]) -> str:
        """Returns the answer to `key`, worked out anew where the last one is too old."""
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
