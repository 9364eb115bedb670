"""A Ray cluster of the tests' own: nodes on this machine, each with a raylet of its own."""

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from patience import LIMIT

from rlx.launch.ray_launcher import QUIET

SETTINGS = {
    **QUIET,
    # Ranks run at the user's priority, and no free memory is demanded.
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # No process beside those of the ranks.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    # A node counts as dead after seconds: its raylet was killed, and answers nothing.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
OBJECT_STORE_BYTES = 80 * 2**20


class RayCluster:
    """A head and two more nodes; each holds one rank.

    Attributes:
        address: HOST:PORT of the head.
        nodes: Ray's nodes, the head's first.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster()
        self.nodes: list[Any] = []
        for _ in range(3):
            node = self._cluster.add_node(
                wait=False,
                num_cpus=1,
                num_gpus=0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
            )
            self.nodes.append(node)
            self._cluster._wait_for_node(node, LIMIT)  # by itself it gives up after 30 s
        self.address = str(self._cluster.address)

    def find_raylet(self, number: int) -> int:
        """The process id of a node's raylet."""
        return int(self.nodes[number].all_processes["raylet"][0].process.pid)

    def kill_node(self, number: int) -> None:
        """Kills a node's raylet, and takes it out of the cluster."""
        os.kill(self.find_raylet(number), signal.SIGKILL)
        self._cluster.remove_node(self.nodes.pop(number), allow_graceful=False)

    def close(self) -> None:
        """Ends all nodes."""
        self._cluster.shutdown()


@contextmanager
def open_ray_cluster() -> Iterator[RayCluster]:
    """Runs a cluster until the block ends; without Ray, the tests that ask are skipped."""
    if importlib.util.find_spec("ray") is None:
        reason = "Ray is not installed: pip install 'rlx[ray]'"
        if os.environ.get("RLX_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="rlx-ray-") as name,
        pytest.MonkeyPatch.context() as own,
    ):
        for setting, value in SETTINGS.items():
            own.setenv(setting, value)
        own.setenv("RAY_TMPDIR", name)  # where `address: auto` finds it
        cluster = RayCluster()
        try:
            yield cluster
        finally:
            cluster.close()
