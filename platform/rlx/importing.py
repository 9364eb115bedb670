"""Faster imports of large libraries, a time limit for imports of plugins, and no downloads."""

import atexit
import gc
import hashlib
import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import NoReturn

IMPORT_TIME_LIMIT = 20.0
"""Time limit for importing one plugin, in seconds."""

BESIDE = ("boto3", "mlflow", "pandas", "scipy", "sklearn")
"""Optional dependencies that transformers and DeepSpeed import if installed: for assisted
generation, for losses of other models, for an autotuner, and for jobs of a cloud."""


def forbid_downloads() -> None:
    """Keeps the libraries of the hub to what is on this machine, unless the environment says else.

    They read it when they are imported, so this comes before anything that may import them.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")


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

    Garbage collection is off inside the block, and imported objects are never scanned after it.
    transformers would read the files of all distributions to know the versions of a dozen, which
    are called like their packages; it remembers which packages it has found.
    """
    beside = () if "transformers" in sys.modules else BESIDE
    collecting, look_up = gc.isenabled(), importlib.metadata.packages_distributions
    gc.disable()
    importlib.metadata.packages_distributions = dict
    try:
        with hide_packages(*beside):
            yield
    finally:
        importlib.metadata.packages_distributions = look_up
        gc.freeze()
        atexit.unregister(_unfreeze)
        atexit.register(_unfreeze)
        if collecting:
            gc.enable()


def _unfreeze() -> None:
    """Lets the last collection of a process find what Triton's library would report as leaked."""
    if "triton" in sys.modules:
        gc.unfreeze()


class ImportAbortedError(BaseException):
    """An import hangs, or would end the process; no `except Exception` of a module stops it."""


@contextmanager
def guard_import() -> Iterator[None]:
    """Raises `ImportAbortedError` where an import in the block hangs or calls `os._exit`.

    Time is limited only in the main thread, and unless a timer runs.
    """

    def refuse(code: int) -> NoReturn:
        if os.getpid() != own:  # a process that the import forked
            end_process(code)
        raise ImportAbortedError(f"importing it ends the process, with exit code {code}")

    own, end_process, os._exit = os.getpid(), os._exit, refuse  # type: ignore[assignment]
    try:
        with _limit_import_time():
            yield
    finally:
        os._exit = end_process


@contextmanager
def _limit_import_time() -> Iterator[None]:
    if current_thread() is not main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def give_up(*_: object) -> None:
        raise ImportAbortedError(f"importing it takes more than {IMPORT_TIME_LIMIT:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    # Again after each second: a module may go on after any exception.
    signal.setitimer(signal.ITIMER_REAL, IMPORT_TIME_LIMIT, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def finds_module(python: str, module: str) -> bool:
    """Whether an interpreter finds a top-level module, wherever it is started."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-P", "-c", find, module], check=False).returncode == 0


def source_digest(file: Path) -> str:
    """SHA-256 of a module's file; for an `__init__.py`, of every `.py` file of its package,
    including the file names."""
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for source in files:
        digest.update(source.relative_to(file.parent).as_posix().encode() + b"\0")
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()
