"""Becomes the supervisor of a run inside a Ray job: `python -m rlx.launch.ray_job RUN_ID`.

A job has no secret from the machine that submitted it: without a URL of the registry, it takes the
cluster's own RLX_REGISTRY. What the supervisor prints goes to the run's log, as on any machine.
"""

import os
import sys

from rlx.home import REGISTRY
from rlx.launch.run_access import locate_run_folder
from rlx_registry import Registry

__all__ = ["main"]


def main(run_id: str) -> None:
    """Opens the run's log, and replaces this process by the supervisor."""
    url = os.environ.get(REGISTRY) or os.environ.get("RLX_REGISTRY")
    if not url:
        sys.exit("this cluster needs RLX_REGISTRY in its environment: the URL has a password")
    with Registry.open(url, read_only=True) as registry:
        folder = locate_run_folder(registry.run(run_id))
    log = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[REGISTRY] = url
    os.execv(sys.executable, [sys.executable, "-m", "rlx.launch.supervisor", run_id])


if __name__ == "__main__":
    main(*sys.argv[1:])
