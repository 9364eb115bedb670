"""Entry point of one rank: `torchrun -m rlx.run.rank FOLDER RUN_ID REGISTRY_URL`.

Nothing is imported at module level but the standard library: scoring processes are spawned from
here and import this module again.
"""

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

SUPERVISOR_EVERY = 2.0
"""Seconds between two looks at whether the supervisor is still there."""


def main(folder: str, run_id: str, registry_url: str) -> int:
    """Runs this rank; writes why it gave up where the supervisor looks for it."""
    from rlx.errors import RlxError
    from rlx.run.paths import RunFolder

    paths = RunFolder(Path(folder))
    supervisor = int(os.environ["RLX_SUPERVISOR"])
    threading.Thread(target=_leave_without, args=(supervisor,), daemon=True).start()
    try:
        _run(paths, run_id, registry_url)
    except Exception as error:  # noqa: BLE001  (recorded, and the rank ends)
        traceback.print_exc()
        code = error.exit_code if isinstance(error, RlxError) else 1
        message = str(error) if isinstance(error, RlxError) else f"{type(error).__name__}: {error}"
        paths.failure.write_text(json.dumps({"message": message, "exit_code": code}))
        return 1
    return 0


def _leave_without(supervisor: int) -> None:
    """Ends this rank once nobody would record how it ended: ranks must not train on unseen."""
    import psutil

    try:
        process = psutil.Process(supervisor)
        while process.is_running():
            time.sleep(SUPERVISOR_EVERY)
    except psutil.NoSuchProcess:
        pass
    print(f"the supervisor, process {supervisor}, is gone", file=sys.stderr, flush=True)
    os._exit(1)


def _run(paths: "RunFolder", run_id: str, registry_url: str) -> None:  # type: ignore[name-defined]  # noqa: F821
    import torch

    from rlx.spec import ExperimentSpec

    spec = ExperimentSpec.model_validate_json(paths.resolved.read_text())
    if spec.runner.device == "cpu" or not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"

    from rlx.learner import join_ranks
    from rlx.record.recorder import Recorder
    from rlx.run.loop import run_experiment
    from rlx_registry import Registry

    ranks = join_ranks(spec.runner)
    if not ranks.is_first:
        run_experiment(spec, paths, ranks, None)
        return
    with Registry.open(registry_url) as registry:
        keep = spec.tracking.rollouts == "all"
        recorder = Recorder(registry, run_id, keep_bodies=keep)
        run_experiment(spec, paths, ranks, recorder)
        recorder.event("completed", "every phase and evaluation is recorded")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
