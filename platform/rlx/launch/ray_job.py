"""Becomes the supervisor of a run inside a Ray job: `python -m rlx.launch.ray_job RUN_ID`.

A job has no secret of the machine that submitted it: the cluster's own RLX_REGISTRY comes first.
What the supervisor prints goes to the run's log, as on any machine.
"""

import json
import os
import sys
from pathlib import Path

from rlx.home import REGISTRY
from rlx.launch.run_access import locate_run_folder
from rlx.spec import ExperimentSpec
from rlx_registry import Registry

__all__ = ["JOB_DIGEST", "JOB_FOLDER", "main"]

JOB_FOLDER, JOB_DIGEST = "RLX_JOB_FOLDER", "RLX_JOB_DIGEST"
"""Environment variables of a job: the folder in which it was submitted, and its experiment."""


def main(run_id: str) -> None:
    """Opens the run's log, and replaces this process by the supervisor."""
    url = os.environ.get("RLX_REGISTRY") or os.environ.get(REGISTRY)
    if not url:
        sys.exit("this cluster needs RLX_REGISTRY in its environment: the run's has a password")
    with Registry.open(url, read_only=True) as registry:
        run = registry.run(run_id)
        recorded = ExperimentSpec.model_validate_json(json.dumps(run.spec), strict=True)
        if os.environ[JOB_DIGEST] not in (recorded.digest, run.digest):
            sys.exit(f"{run_id} is another run in this cluster's RLX_REGISTRY")
        folder = locate_run_folder(run)
    if not folder.root.is_dir():
        sys.exit(f"this cluster does not see {folder.root}: RLX_HOME must be where it does")
    log = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.chdir(os.environ[JOB_FOLDER])
    except OSError as error:
        print(f"works in {Path.cwd()}: {error}", flush=True)
    os.environ[REGISTRY] = url
    os.execv(sys.executable, [sys.executable, "-m", "rlx.launch.supervisor", run_id])


if __name__ == "__main__":
    main(*sys.argv[1:])
