"""Starts of rlx by a fork: a copy of a process that has imported the libraries becomes `rlx`.

Importing torch, transformers and DeepSpeed costs a rank more than a small run does. A helper
imports them once, and what tests start begins as a copy of it: the command line, its supervisor,
and its ranks. A copy gets what a new interpreter would get: its
parent, process group, open files, folder, environment and command line, also where other processes
read them, in /proc. Nothing of rlx has run in the helper, and each copy has a helper of its own for
what it starts, made before anything runs in it and hidden from it: supervisors wait for what is
left of an attempt, and kill it.

A worker of vLLM that pytest itself starts is a copy of a helper of its own, which has vLLM; that of
a rank is a new interpreter.

Copies share the seed of `hash`, and what libraries read from the environment when imported. Where
that or the start itself is under test, use `cold_starts`. Only `pytest --forks` makes copies.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.process
import multiprocessing.util
import os
import platform
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["cold_starts", "fork_rlx"]

MAIN = "import sys; from rlx.cli import main; sys.exit(main())"
"""How tests start the command line."""
STARTED = (
    *("rlx.launch.supervisor", "rlx.launch.rank", "torch.distributed.run"),
    *("rlx.launch.slurm_node", "rlx.launch.ray_driver"),
    *("measure_checkpoints", "measure_learner", "measure_loading"),
    *(f"gpu.{name}" for name in ("check", "gpu_kernels", "precision", "speed")),
    *(f"gpu.{name}" for name in ("collectives", "kill_resume", "stages", "whole_run")),
)
"""What rlx and tests start, with `python -m`, and torchrun with `python -u -m`."""
ENGINES = ("rlx.sampler.vllm_worker", "forgetful_vllm_worker")
"""Workers of vLLM, which start nothing themselves."""
PACKAGES = ("rlx", "rlx_registry", "rlx_web", "rlx_plugins", "rlx_gyms")
"""Where a path has other versions of these, starts are cold."""
HUB = ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT")
"""What libraries keep of the environment when they are imported: with others, starts are cold."""
SPAWNED = "from multiprocessing.spawn import spawn_main;"
ROOM = 1 << 16
"""Bytes that the command line and the environment of a copy may have, each."""
MESSAGE, FILES = 1 << 17, 16
SINGLE = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps libraries from starting threads when imported, which a copy would lack."""
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
PR_GET_TID_ADDRESS = 40

_libc = ctypes.PyDLL(None, use_errno=True)
_set_session = os.setsid
_execute, _spawn = subprocess._fork_exec, multiprocessing.util.spawnv_passfds
_imported_in = dict(os.environ)
_helper: socket.socket | None = None
_engines: socket.socket | None = None
"""The helper for workers of vLLM, which only the first process has."""
_session = os.getsid(0)
"""Of the helper; what it starts is in this session or in one of its own."""
_asking = threading.Lock()


# Whoever starts something ------------------------------------------------------------------------


def fork_rlx() -> None:
    """Lets this process start rlx by forks from now on; the helper is made when it is needed."""
    if sys.platform == "linux" and platform.machine() in CLONE:
        _patch(_start, _spawn)


def _patch(execute: Callable[..., int], spawn: Callable[..., int]) -> None:
    subprocess._fork_exec = execute  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawn


@contextmanager
def cold_starts() -> Iterator[None]:
    """Starts a new interpreter for everything inside, and for what that starts."""
    before = subprocess._fork_exec, multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
    _patch(_execute, _spawn)
    try:
        yield
    finally:
        _patch(*before)


def _start(args: Sequence[Any], *options: Any) -> int:
    """Starts what `subprocess` asks for; returns the process id."""
    (executables, _, kept, cwd, env, stdin, _, _, stdout, _, stderr, _, error) = options[:13]
    new_session, group, *identity, prepare = options[14:21]
    words = [os.fsdecode(word) for word in args]
    if _is_engine(words) and prepare is None and env is not None:
        files = {0: stdin, 1: 1, 2: 2, **{file: file for file in kept if file != error}}
        return _ask_engines(words, files, dict(os.fsdecode(v).split("=", 1) for v in env))
    plain = prepare is None and list(kept) == [error] and group == -1
    plain = plain and all(value in (None, -1) for value in identity) and _has_helper()
    if not (plain and os.fsencode(sys.executable) in executables and _is_rlx(words)):
        return int(_execute(args, *options))
    given = dict(os.fsdecode(v).split("=", 1) for v in env) if env is not None else None
    environment = dict(os.environ) if given is None else given
    if not _fits(environment):
        return int(_execute(args, *options))
    files = {own: own if given < 0 else given for own, given in enumerate((stdin, stdout, stderr))}
    return _ask_helper(words, files, os.fsdecode(cwd or Path.cwd()), environment, new_session)


def _is_engine(words: Sequence[str]) -> bool:
    """Whether it is a worker of vLLM that can be a copy: in pytest itself."""
    how, what = _program(words)[:2]
    return how == "-m" and what in ENGINES and __name__ != "__main__"


def _ask_engines(
    words: Sequence[str], files: Mapping[int, int], environment: Mapping[str, str]
) -> int:
    """Starts a worker of vLLM; the helper has the environment of the first."""
    global _engines
    with _asking:
        _engines = _engines or _make_helper("engines", environment)
    return _ask(_engines, words, files, os.fsdecode(Path.cwd()), environment, os.getpgrp())


def _start_spawned(path: bytes, args: Sequence[Any], passed: Iterable[int]) -> int:
    """Starts a process of `multiprocessing`, such as one that scores; returns its id."""
    words, passed = [os.fsdecode(word) for word in args], list(passed)
    if not _has_helper() or not _program(words)[1].startswith(SPAWNED):
        return int(_spawn(path, args, passed))
    return _ask_helper(words, {file: file for file in (0, 1, 2, *passed)}, os.fsdecode(Path.cwd()))


def _fits(environment: Mapping[str, str]) -> bool:
    """Whether the helper's imports are those of this environment."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = _imported_in.get("PYTHONPATH", "").split(os.pathsep)
    others = any(Path(path, name).exists() for path in {*paths} - {*own} for name in PACKAGES)
    return not others and all(environment.get(v) == _imported_in.get(v) for v in HUB)


def _is_rlx(words: Sequence[str]) -> bool:
    """Whether a copy can be it; `rlx mlflow` becomes another program, which leaves no helper."""
    how, what, verb = _program(words)[:3]
    return (how == "-c" and what == MAIN and verb != "mlflow") or (how == "-m" and what in STARTED)


def _program(words: Sequence[str]) -> list[str]:
    """A command of Python without its options: how the program is given, itself, the rest."""
    first = next((n for n, word in enumerate(words) if word in ("-c", "-m")), len(words))
    return [*words[first:], "", "", ""]


def _ask_helper(
    words: Sequence[str],
    files: Mapping[int, int],
    cwd: str,
    environment: Mapping[str, str] | None = None,
    new_session: bool = False,
) -> int:
    """Has the helper start something; `files` are this process's own, by what they become."""
    global _helper
    with _asking:
        _helper = _helper or _make_helper()
    environment = os.environ if environment is None else environment
    return _ask(_helper, words, files, cwd, environment, None if new_session else os.getpgrp())


def _ask(
    helper: socket.socket,
    words: Sequence[str],
    files: Mapping[int, int],
    cwd: str,
    environment: Mapping[str, str],
    group: int | None,
) -> int:
    request = {
        "words": words,
        "files": list(files),
        "cwd": cwd,
        "environment": dict(environment),
        "group": group,
    }
    with _asking:
        socket.send_fds(helper, [json.dumps(request).encode()], list(files.values()))
        return int(helper.recv(64))


def _has_helper() -> bool:
    """Whether what this process starts can be a copy: it is in its session, its helper lives."""
    if os.getsid(0) != _session:
        return False
    return _helper is None or not select.select([_helper], [], [], 0)[0]


def _make_helper(
    libraries: str = "rlx", environment: Mapping[str, str] = _imported_in
) -> socket.socket:
    """Starts the first helper, which ends with this process."""
    ours, theirs = _make_sockets()
    environment = {**environment, **SINGLE, "DS_ACCELERATOR": "cpu", "_ROOM": "-" * ROOM}
    command = [sys.executable, __file__, str(theirs.fileno()), libraries, "-" * ROOM]
    child = subprocess.Popen(
        command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
    )
    theirs.close()
    atexit.register(child.wait)
    atexit.register(ours.close)
    return ours


def _make_sockets() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
    return pair


# The helper --------------------------------------------------------------------------------------


def _import_libraries() -> None:
    from rlx.importing import speed_up_imports

    with speed_up_imports():
        import deepspeed.module_inject.auto_ep_layer
        import matplotlib.pyplot
        import rich.live
        import rich.progress
        import torch

        import rlx.cli.verb_group
        import rlx.launch.attempt
        import rlx.launch.start_stop
        import rlx.record.tracking
        from rlx.learner import join_ranks
        from rlx.record import Recorder
        from rlx.run import run_experiment
        from rlx_registry import Registry

    # Last: transformers would import more for them.
    import mlflow.store.tracking.sqlalchemy_store
    import pyarrow.parquet
    import scipy.optimize
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # makes the table of all models, which it keeps

    _ = mlflow, matplotlib.pyplot, torch, rlx, join_ranks, Recorder, run_experiment, Registry
    _ = deepspeed, pyarrow, rich, scipy


def _import_engine() -> None:
    from rlx.importing import speed_up_imports

    with speed_up_imports():
        import vllm.v1.worker.cpu_worker
        from vllm import LLM

        import rlx.sampler.vllm_worker

    _ = vllm, LLM, rlx


def _require_one_thread() -> None:
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, "a library has started threads, which a copy would lack"


def _serve(asked: socket.socket) -> None:
    """Makes copies until whoever asks for them has ended. They return from here."""
    while True:
        message, files, _, _ = socket.recv_fds(asked, MESSAGE, FILES)
        if not message:
            os._exit(0)
        ready, alike = os.pipe()
        pid = _clone()
        if pid == 0:
            asked.close()
            os.close(ready)
            _become(json.loads(message), files, alike)
        for file in (*files, alike):
            os.close(file)
        os.read(ready, 1)  # until others see what was asked for, or it has ended
        os.close(ready)
        asked.send(str(pid).encode())


def _clone() -> int:
    """Forks; the child's parent is this process's own, as if that had started it."""
    own = ctypes.c_void_p()
    _libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(own), 0, 0, 0)
    flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | signal.SIGCHLD
    arguments = [flags, 0, 0, own, own] if platform.machine() == "x86_64" else [flags, 0, 0, 0, own]
    sys.stdout.flush()
    pid = int(_libc.syscall(CLONE[platform.machine()], *arguments))
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


# A copy ------------------------------------------------------------------------------------------


def _become(request: dict[str, Any], files: Sequence[int], alike: int) -> NoReturn:
    """Turns this copy into the program that was asked for, and ends with it.

    Args:
        request: of `_ask_helper`.
        files: that it asked with.
        alike: file that is closed once the copy looks like that program.
    """
    global _helper, _session
    if request["group"] is None:
        os.setsid()
    words, environment = request["words"], request["environment"]
    how, what, *rest = _program(words)[:-3]
    if what.startswith(SPAWNED):
        _forget_workers()
    elif what in ENGINES:
        _patch(_execute, _spawn)
    else:
        _session, _helper = os.getsid(0), _fork_own_helper((*files, alike))
        _patch(_start, _start_spawned)
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    _write_over(48, words)
    _write_over(50, [f"{name}={value}" for name, value in environment.items()])
    os.close(alike)
    _place_files(dict(zip(request["files"], files, strict=True)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    _take_environment(environment)
    _open_streams()
    sys.argv = [how if how == "-c" else what, *rest]
    _end(_run(how, what))


def _fork_own_helper(files: Iterable[int]) -> socket.socket:
    ours, theirs = _make_sockets()
    helper = os.fork()
    if helper == 0:
        ours.close()
        for file in files:
            os.close(file)
        os.setpgid(0, 0)  # out of reach of what is sent to the copy's group
        _serve(theirs)
    theirs.close()
    _hide_helper(helper)
    return ours


def _hide_helper(helper: int) -> None:
    """Keeps it from a copy that kills all its descendants, as a supervisor after an attempt."""
    import psutil

    list_children = psutil.Process.children

    def list_others(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        return [child for child in list_children(process, recursive) if child.pid != helper]

    psutil.Process.children = list_others  # type: ignore[method-assign]


def _forget_workers() -> None:
    """Has a scoring worker import its module again, whose memory all copies would share."""
    for name in [name for name in sys.modules if name.startswith("rlx.reward.worker")]:
        del sys.modules[name]
    _patch(_execute, _spawn)


def _place_files(files: dict[int, int]) -> None:
    """Gives files the numbers that they are to have; whatever has such a number moves away."""
    global _helper
    above = 1 + max(*files, *files.values())
    if _helper is not None:
        above = max(above, _helper.fileno() + 1)
        _helper = socket.socket(fileno=fcntl.fcntl(_helper.detach(), fcntl.F_DUPFD_CLOEXEC, above))
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in files.items()}
    os.closerange(3, above)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)


def _take_environment(environment: dict[str, str]) -> None:
    """Replaces the environment, with what an interpreter reads of it when it starts."""
    before = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.clear()
    os.environ.update(environment)
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = str(Path(__file__).parent)
    sys.path = ["", *added, *(p for p in sys.path if p not in {*before, *added, own})]
    tempfile.tempdir = None
    importlib.reload(sys.modules["huggingface_hub.constants"])  # HF_HOME
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")


def _write_over(field: int, words: Sequence[str]) -> None:
    """Writes the words to where /proc shows them; a field of `stat` says where that begins."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[field - 3]), int(fields[field - 2])
    content = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(content) < end - start, "more than a copy has room for"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))


def _open_streams() -> None:
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        file = open(number, "wb", closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            file, "utf-8", errors, line_buffering=number == 2, write_through=unbuffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(how: str, what: str) -> int:
    """Runs the program; returns its exit code, as an interpreter does."""
    try:
        if how == "-m":
            sys.modules.pop(what, None)
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(what, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code & 0xFF)


if __name__ == "__main__":
    os.setpgid(0, 0)
    if sys.argv[2] == "engines":
        _import_engine()
    else:
        _import_libraries()
    _require_one_thread()
    gc.freeze()
    fork_rlx()
    _serve(socket.socket(fileno=int(sys.argv[1])))
