"""Entry point of one rank: `python -m rlx.launch.rank FOLDER RUN_ID`, directly or under torchrun.
Forks of `rlx.launch.fork_server` enter here as well.

Only the standard library is imported at module level, because scoring processes are spawned from
here and import this module again.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

__all__ = ["import_libraries", "keep_compiled_kernels", "main", "show_activity", "write_failure"]

KERNELS = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of torch: where its compiler keeps kernels, and Triton's below it."""
MEMORY_HISTORY = "RLX_MEMORY_HISTORY"
"""Environment variable: if set, a snapshot of memory says which lines allocated it."""
SUPERVISOR_EVERY = 2.0
"""Seconds between two checks that the supervisor is alive."""


def main(folder: str, run_id: str) -> int:
    """Runs this rank; if it fails, writes the reason to a file for the supervisor."""
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks a hung rank for its stacks
    _name_semaphores()
    supervisor = int(os.environ["RLX_SUPERVISOR"])
    watch = threading.Thread(target=_exit_without_supervisor, args=(supervisor,), daemon=True)
    watch.start()
    try:
        _run_rank(Path(folder), run_id)
    except Exception as error:  # noqa: BLE001  (recorded, and the rank ends)
        write_failure(Path(folder), error)  # first: on a full disk, writing the log fails
        traceback.print_exc()
        _explain_lack_of_memory(Path(folder), error)
        return 1
    return 0


def _name_semaphores() -> None:
    from rlx.launch.leftovers import name_semaphores

    name_semaphores()


def write_failure(folder: Path, error: Exception) -> None:
    """Writes atomically why this rank failed; the failure of an earlier rank is kept."""
    from rlx.errors import RlxError
    from rlx.home import RunFolder
    from rlx.launch.failures import (
        convert_to_rlx_error,
        describe_error,
        is_disk_full,
        is_learner_out_of_memory,
        is_registry_away,
    )
    from rlx.out_of_memory import is_out_of_memory

    paths = RunFolder(folder)
    rlx_error = convert_to_rlx_error(error)
    failure = {
        "message": describe_error(error),
        "exit_code": 1 if rlx_error is None else rlx_error.exit_code,
        # An rlx error would occur again; a lost connection or device may come back.
        "again": is_registry_away(error) or (rlx_error is None and not isinstance(error, RlxError)),
        "needs_smaller_batches": is_learner_out_of_memory(error),
        "lacks_gpu_memory": is_out_of_memory(error),
    }
    if is_disk_full(error):
        paths.reserve.unlink(missing_ok=True)
    if not paths.failure.exists():
        aside = paths.failure.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(failure))
        aside.replace(paths.failure)


def _explain_lack_of_memory(folder: Path, error: Exception) -> None:
    """Writes what holds the GPU's memory, if this rank ran out of it: the tensors of all that was
    going on are still there."""
    from rlx.out_of_memory import is_out_of_memory

    if not is_out_of_memory(error):
        return
    from rlx.home import RunFolder
    from rlx.run import write_memory_snapshot

    snapshot = RunFolder(folder).memory_snapshot
    write_memory_snapshot(snapshot)
    print(f"what held the GPU's memory: {snapshot}, for pytorch.org/memory_viz", file=sys.stderr)


def _exit_without_supervisor(supervisor: int) -> None:
    """Ends this rank once its supervisor is gone: ranks must not train on unobserved."""
    import psutil

    from rlx.launch.leftovers import remove_temporary_folder

    try:
        process = psutil.Process(supervisor)
        # A killed supervisor stays a zombie, which counts as running, until its parent reaps it.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(SUPERVISOR_EVERY)
    except psutil.NoSuchProcess:
        pass
    with suppress(OSError):  # it may have read what this process prints
        print(f"the supervisor, process {supervisor}, is gone", file=sys.stderr, flush=True)
    remove_temporary_folder()
    os._exit(1)


def keep_compiled_kernels() -> None:
    """Has torch keep what it compiles in this machine's cache, unless the user chose a folder.

    It would take the temporary folder, which is gone after the attempt. If the cache cannot be
    written, it does.
    """
    from rlx_registry import locate_cache

    folder = locate_cache() / "inductor"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            os.environ.setdefault(KERNELS, str(folder))


def import_libraries(*, on_cpu: bool) -> None:
    """Imports what a rank needs, which takes longer than all else before its first step."""
    from rlx.importing import speed_up_imports

    with speed_up_imports():
        import torch

        if on_cpu or not torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cpu"

        from rlx.learner import join_ranks
        from rlx.record import Recorder
        from rlx.run import run_experiment
        from rlx_registry import Registry
    _ = join_ranks, Recorder, run_experiment, Registry


def show_activity(folder: Path, what: str) -> None:
    """Shows what the first rank does before it trains."""
    from rlx.home import RunFolder
    from rlx.run import ProgressFile

    is_first = os.environ.get("RANK", "0") == "0"
    ProgressFile(RunFolder(folder).progress if is_first else None).show_activity(what)


def _run_rank(folder: Path, run_id: str) -> None:
    from rlx.home import ATTEMPT, DISK, REGISTRY, RunFolder
    from rlx.launch.stored_spec import load_resolved_spec

    paths = RunFolder(folder)
    keep_compiled_kernels()
    show_activity(folder, "libraries")
    spec = load_resolved_spec(paths)
    import_libraries(on_cpu=spec.runner.device == "cpu")
    from rlx.learner import join_ranks
    from rlx.record import Recorder, retry_registry_call
    from rlx.run import RunStopped, StopRequest, record_allocations, run_experiment
    from rlx_registry import Registry

    show_activity(folder, "ranks")
    ranks, stop = join_ranks(spec.runner, os.environ.get(DISK, "")), StopRequest()
    if os.environ.get(MEMORY_HISTORY) and ranks.device.type == "cuda":
        record_allocations()
    if not ranks.is_first:
        with suppress(RunStopped):
            run_experiment(spec, paths, ranks, None, stop)
        return
    with retry_registry_call(lambda: Registry.open(os.environ[REGISTRY])) as registry:
        writer = retry_registry_call(lambda: registry.as_writer(run_id, int(os.environ[ATTEMPT])))
        stored = spec.tracking.rollouts
        every = 1 if isinstance(stored, str) else stored.every
        recorder = Recorder(
            writer, run_id, keep_bodies=stored != "none", every=every, last=spec.steps
        )
        with suppress(RunStopped):
            run_experiment(spec, paths, ranks, recorder, stop)
            recorder.event("completed", "every phase and evaluation is recorded")


if __name__ == "__main__":
    from rlx.launch.log_lines import stamp_output

    stamp_output()
    sys.exit(main(*sys.argv[1:]))
