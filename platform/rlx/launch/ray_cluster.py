"""Joins a Ray cluster, or starts one; `python -m rlx.launch.ray_cluster ADDRESS` prints its nodes.

A cluster of the run's own lives in the temporary folder of the attempt, and ends with this process.
"""

import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlx.errors import EnvironmentFault
from rlx.launch.ray_launcher import SERVER_KIND, Bundle, Demand, connect_to_cluster

__all__ = ["JOINING", "join_cluster", "list_nodes", "open_own_cluster"]

PAUSE, JOINING = 1.0, 90.0
"""Seconds between two tries to join a cluster, and the most that one takes: Ray waits itself for a
node on this machine."""
STORE = 80 * 2**20
"""Bytes of shared memory for objects: what is to be scored, some chunks at a time."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore",
}
OWN = {
    # As the local launcher: ranks run at the user's priority, and no free memory is demanded.
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # No process beside those of the ranks.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
}


@contextmanager
def open_own_cluster(choices: Sequence[Sequence[Demand]]) -> Iterator[None]:
    """Starts a cluster of one node that has processors for any of these, and ends it."""
    processors = max(
        sum(demand.count * demand.bundle.get("CPU", 0) for demand in demands) for demands in choices
    )
    every = [demand for demands in choices for demand in demands]
    _start_ray(
        {**QUIET, **OWN},
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(processors)),
        num_gpus=None if any("GPU" in demand.bundle for demand in every) else 0,
        include_dashboard=False,
        # Weights for servers take more than jobs, how much is known later: Ray's own default.
        object_store_memory=None if any(d.kind == SERVER_KIND for d in every) else STORE,
        _temp_dir=tempfile.gettempdir(),
    )
    with _leave_ray():
        yield


@contextmanager
def join_cluster(
    address: str, temporary: str | None = None, wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Joins a cluster that exists, and leaves it.

    Args:
        address: as in `runner.launcher.address`.
        temporary: the folder in which "auto" finds the cluster of this machine.
        wait: called with the reason whenever the cluster cannot be joined, before the next try;
            what it raises ends the wait. None: there is no second try.

    Raises:
        EnvironmentFault: nothing answers at the address.
        ConnectionError: what answers has no node on this machine.
    """
    own = {} if temporary is None else {"RAY_TMPDIR": temporary}
    while True:
        try:
            connect_to_cluster(address)
            _start_ray({**QUIET, **own}, address=address)
            break
        except (EnvironmentFault, ConnectionError) as error:
            if wait is None:
                raise
            wait(str(error))
            time.sleep(PAUSE)
    with _leave_ray():
        yield


def _start_ray(environment: dict[str, str], **options: Any) -> None:
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    import ray  # reads the environment

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except BaseException:
        ray.shutdown()
        raise


@contextmanager
def _leave_ray() -> Iterator[None]:
    import ray

    try:
        yield
    finally:
        ray.shutdown()


def list_nodes() -> list[Bundle]:
    """What each live node of the joined cluster has."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


if __name__ == "__main__":
    try:
        with join_cluster(sys.argv[1]):
            nodes = list_nodes()
    except Exception as error:  # noqa: BLE001  (whoever asked reads its text)
        sys.exit(f"{type(error).__name__}: {error}".replace("\n", " "))
    sys.stdout.write(json.dumps(nodes) + "\n")
