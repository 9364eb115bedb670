"""Entry point of one rank: `python -m rlx.launch.rank FOLDER RUN_ID`, in the environment of
torch.distributed.

Only the standard library is imported at module level, because scoring processes are spawned from
here and import this module again.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

KERNELS = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of torch: where its compiler keeps kernels, and Triton's below it."""
SUPERVISOR_CHECK_INTERVAL = 2.0
"""Seconds between two checks that the supervisor is alive."""


def main(folder: str, run_id: str) -> int:
    """Runs this rank; if it fails, writes the reason to a file for the supervisor."""
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks a hung rank for its stacks
    supervisor = int(os.environ["RLX_SUPERVISOR"])
    watch = threading.Thread(target=_exit_without_supervisor, args=(supervisor,), daemon=True)
    watch.start()
    try:
        _run_rank(Path(folder), run_id)
    except Exception as error:  # noqa: BLE001  (recorded, and the rank ends)
        from rlx.home import RunFolder
        from rlx.launch.failures import write_failure

        write_failure(RunFolder(Path(folder)), error)  # first: a full disk fails writing the log
        traceback.print_exc()
        _explain_lack_of_memory(Path(folder), error)
        return 1
    return 0


def _explain_lack_of_memory(folder: Path, error: Exception) -> None:
    """Writes what holds the GPU's memory, if this rank ran out of it."""
    from rlx.errors import is_out_of_memory

    if not is_out_of_memory(error):
        return
    import torch

    from rlx.home import RunFolder

    snapshot = RunFolder(folder).memory_snapshot
    torch.cuda.memory._dump_snapshot(str(snapshot))
    print(f"what held the GPU's memory: {snapshot}, for pytorch.org/memory_viz", file=sys.stderr)


def _exit_without_supervisor(supervisor: int) -> None:
    """Ends this rank once its supervisor is gone: ranks must not train on unobserved."""
    import psutil

    from rlx.launch.processes import remove_temporary_folder

    try:
        process = psutil.Process(supervisor)
        # A killed supervisor stays a zombie, which counts as running, until its parent reaps it.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(SUPERVISOR_CHECK_INTERVAL)
    except psutil.NoSuchProcess:
        pass
    with suppress(OSError):  # it may have read what this process prints
        print(f"the supervisor, process {supervisor}, is gone", file=sys.stderr, flush=True)
    remove_temporary_folder()
    os._exit(1)


def keep_compiled_kernels() -> None:
    """Has torch keep what it compiles in this machine's cache, if it can be written and the user
    chose no folder. In the temporary folder it would be gone after the attempt."""
    from rlx.home import locate_cache

    folder = locate_cache() / "inductor"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            os.environ.setdefault(KERNELS, str(folder))


def _run_rank(folder: Path, run_id: str) -> None:
    from rlx.home import ATTEMPT, REGISTRY, RunFolder
    from rlx.importing import speed_up_imports
    from rlx.launch.run_access import load_resolved_spec, require_same_data
    from rlx.progress import ProgressFile

    paths = RunFolder(folder)
    is_first = os.environ.get("RANK", "0") == "0"
    progress = ProgressFile(paths.progress if is_first else None)
    keep_compiled_kernels()
    progress.show_activity("libraries")
    spec = load_resolved_spec(paths)
    with speed_up_imports():  # which take longer than all else before the first step
        import torch

        if spec.runner.device == "cpu" or not torch.cuda.is_available():
            os.environ["DS_ACCELERATOR"] = "cpu"

        from rlx.learner import join_ranks
        from rlx.record import Recorder, retry_registry_call
        from rlx.run import RunStopped, StopRequest, run_experiment
        from rlx_registry import Registry
    progress.show_activity("ranks")
    ranks, stop = join_ranks(spec.runner), StopRequest()
    if not ranks.is_first:
        with suppress(RunStopped):
            run_experiment(spec, paths, ranks, None, stop)
        return
    with retry_registry_call(lambda: Registry.open(os.environ[REGISTRY])) as registry:
        writer = retry_registry_call(lambda: registry.as_writer(run_id, int(os.environ[ATTEMPT])))
        require_same_data(retry_registry_call(lambda: registry.run(run_id)))
        stored = spec.tracking.rollouts
        every = 1 if isinstance(stored, str) else stored.every
        recorder = Recorder(
            writer, run_id, keep_bodies=stored != "none", every=every, last=spec.steps
        )
        with suppress(RunStopped):
            run_experiment(spec, paths, ranks, recorder, stop)
            recorder.event("completed", "every phase and evaluation is recorded")


if __name__ == "__main__":
    from rlx.launch.processes import stamp_output

    stamp_output()
    sys.exit(main(*sys.argv[1:]))
