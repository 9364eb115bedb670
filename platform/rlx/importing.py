"""Faster imports of large libraries, and a time limit for imports of plugins."""

import atexit
import gc
import hashlib
import importlib
import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import current_thread, main_thread
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

IMPORT_TIME_LIMIT = 20.0
"""Time limit for importing one plugin, in seconds."""


BESIDE = ("boto3", "mlflow", "pandas", "scipy", "sklearn")
"""Optional dependencies that transformers and DeepSpeed import if installed: for assisted
generation, for losses of other models, for an autotuner, and for jobs of a cloud."""


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

    transformers looks up which distribution each installed package is of, to know its version: the
    files of all of them are read for a dozen packages, whose distributions are called like them.
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


COMPILER, MASKING = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op"
"""torch's compiler; and the part of it that attention masks of transformers need, without it."""


class _LateCompiler(ModuleType):
    """Stands for torch's compiler until something is compiled, or more of it is asked for.

    Importing it takes half a second, and its end a second more. Optimizers, process groups and
    models import it only to say what is not to be compiled, or how.
    """

    def __init__(self) -> None:
        super().__init__(COMPILER)
        import torch

        self.__path__ = [str(Path(torch.__file__).with_name("_dynamo"))]
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
        self.eval_frame = SimpleNamespace(OptimizedModule=type("OptimizedModule", (), {}))
        self._marks: list[tuple[str, Any]] = []
        for mark in ("allow_in_graph", "assume_constant_result", "disallow_in_graph"):
            setattr(self, mark, partial(self._mark, mark))

    def _mark(self, mark: str, function: Any) -> Any:
        self._marks.append((mark, function))
        return function

    @staticmethod
    def disable(fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        return (lambda function: function) if fn is None else fn

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Nothing is compiled, so no graph ends here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.import_compiler(), name)

    def import_compiler(self) -> ModuleType:
        """Imports the compiler in place of this, unless that has happened."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
            compiler = importlib.import_module(COMPILER)
            if MASKING in sys.modules:
                setattr(compiler, MASKING.rpartition(".")[2], sys.modules[MASKING])
            for mark, function in self._marks:
                getattr(compiler, mark)(function)
        return importlib.import_module(COMPILER)


class _CompilerParts(MetaPathFinder, Loader):
    """Has the compiler imported before a part of it, which it may import itself."""

    def __init__(self, late: _LateCompiler) -> None:
        self._late = late

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name.rpartition(".")[0] != COMPILER or name == MASKING:
            return None
        self._late.import_compiler()
        return ModuleSpec(name, self) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has been imported by the compiler."""


def postpone_compiler() -> None:
    """Has this process import torch's compiler only once something is compiled."""
    if COMPILER not in sys.modules:
        late = _LateCompiler()
        sys.modules[COMPILER] = late
        sys.meta_path.insert(0, _CompilerParts(late))


def _unfreeze() -> None:
    """Lets the last collection of a process find what Triton's library would report as leaked."""
    if "triton" in sys.modules:
        gc.unfreeze()


class ImportAbortedError(BaseException):
    """An import hangs, or would end the process; no `except Exception` of a module stops it."""


@contextmanager
def guard_import() -> Iterator[None]:
    """Stops an import in the block that hangs or that ends the process by `os._exit`.

    Time is limited only in the main thread, and unless a timer runs.

    Raises:
        ImportAbortedError: the import hangs, or calls `os._exit`.
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
    """Whether an interpreter finds a top-level module, wherever it is started.

    Raises:
        OSError: the interpreter cannot be started.
    """
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
