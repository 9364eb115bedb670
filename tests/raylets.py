"""A Ray cluster of the tests' own: three nodes on this machine, each with a raylet of its own."""

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT, wait_until

from rlx.home import RunFolder
from rlx.launch.ray_cluster import OWN, QUIET, STORE, join_cluster
from rlx.launch.ray_head import HeadWatch
from rlx.launch.ray_launcher import Demand
from rlx.reward import ScorersAddress
from rlx.reward.actors import ActorPool
from rlx.spec import RunnerSpec

__all__ = ["RayCluster", "open_driver", "open_ray_cluster", "open_scorers"]

SEPARATE = ("unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",)))
"""Starts a command that may mount folders which others do not see."""
SETTINGS = {
    **QUIET,
    **OWN,
    # A node counts as dead after seconds: its raylet was killed, and answers nothing.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """A head and two more nodes; each holds one rank, and the head also has a resource `odd`.

    Attributes:
        address: HOST:PORT of the head, which stays when it is killed or replaced.
        nodes: Ray's nodes, the head's first.
    """

    def __init__(self) -> None:
        self._begin()
        self.add_node(odd=1)
        self.add_node()
        self.add_node()
        self.address = str(self._cluster.address)

    def _begin(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster()
        self.nodes: list[Any] = []
        self._sizes: list[dict[str, Any]] = []

    def add_node(self, processors: int = 1, **resources: float) -> None:
        """Adds a node."""
        self._add_node({"num_cpus": processors, "resources": resources})

    def _add_node(self, size: dict[str, Any], **options: Any) -> None:
        self._sizes.append(size)
        self.nodes.append(
            self._cluster.add_node(
                wait=False,
                num_gpus=0,
                object_store_memory=STORE,
                include_dashboard=False,
                **size,
                **options,
            )
        )
        self._cluster._wait_for_node(self.nodes[-1], LIMIT)  # by itself it gives up after 30 s

    def add_separate_node(self, hidden: Path, **resources: float) -> subprocess.Popen[bytes]:
        """Adds a node that does not see a folder, as if its disk were another machine's, and waits
        for it.

        It holds one rank, and is no part of `nodes`.

        Args:
            hidden: the folder; empty on the node.
        """
        node = subprocess.Popen(
            [
                *SEPARATE,
                *("sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)),
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                *(f"--address={self.address}", "--num-cpus=1", "--num-gpus=0"),
                *(f"--resources={json.dumps(resources)}", f"--object-store-memory={STORE}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until("the node to join", lambda: {*resources} <= self._list_resources())
        return node

    def _list_resources(self) -> set[str]:
        """Names of what nodes of the cluster have."""
        command = [sys.executable, "-m", "rlx.launch.ray_cluster", self.address]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return {name for node in json.loads(done.stdout.splitlines()[-1]) for name in node}

    def find_raylet(self, number: int) -> int:
        """The process id of a node's raylet."""
        return int(self.nodes[number].all_processes["raylet"][0].process.pid)

    def kill_node(self, number: int) -> None:
        """Kills a node's raylet, and takes it out of the cluster."""
        os.kill(self.find_raylet(number), signal.SIGKILL)
        self._sizes.pop(number)
        self._cluster.remove_node(self.nodes.pop(number), allow_graceful=False)

    def kill_head(self, *, node: bool) -> None:
        """Kills the head of the cluster.

        Args:
            node: with the raylet of its node, as if the machine were lost.
        """
        if node:
            os.kill(self.find_raylet(0), signal.SIGKILL)
        self.nodes[0].kill_gcs_server(check_alive=False)

    def restart_head(self) -> None:
        """Starts the head again, which knows what it has known if that is kept elsewhere."""
        self.nodes[0].start_gcs_server()

    def replace(self) -> None:
        """Ends all nodes, and starts a new cluster of such nodes at the same address."""
        port, sizes = int(self.address.rpartition(":")[2]), self._sizes
        self.close()
        self._begin()
        for number, size in enumerate(sizes):
            self._add_node(size, **({} if number else {"gcs_server_port": port}))

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


def _serve_scorers(
    address: str, folder: str, count: int, environment: dict[str, str], pipe: Connection
) -> None:
    """Does what the driver of a run does for scorers, until it is told to end."""
    from rlx.launch.ray_actor import build_order, end_actors, require_actors
    from rlx.launch.ray_reservation import reserve_places
    from rlx.launch.ray_scorers import start_scorers

    taken = {"memory": 2.0**20}  # no processors, which runs beside them need
    demand = Demand("scorers", count, taken, ((), ()))
    runner = RunnerSpec(reward_memory_mb=256)
    with (
        join_cluster(address),
        reserve_places(
            [demand], "SPREAD", HeadWatch(address, print, print), first_here=False
        ) as reservation,
    ):
        while not reservation.wait(1.0):
            pass
        order = build_order(RunFolder(Path(folder)), environment)
        scorers, found = start_scorers(reservation, runner, order)
        try:
            require_actors("scorer", scorers, lambda: None)
            pipe.send(found)
            pipe.recv()
        except ConnectionError as error:
            pipe.send(error)
        end_actors(scorers)


@contextmanager
def open_driver(
    cluster: RayCluster, folder: Path, count: int, **environment: str
) -> Iterator[tuple[ScorersAddress, Any]]:
    """Runs scorers of a driver of their own; yields where they are, and the driver's process."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    driver = spawn.Process(
        target=_serve_scorers, args=(cluster.address, str(folder), count, environment, theirs)
    )
    driver.start()
    theirs.close()
    try:
        found = ours.recv()
        if isinstance(found, Exception):
            raise found
        yield found, driver
        with suppress(BrokenPipeError):  # the test has killed it
            ours.send("end")
        driver.join(LIMIT)
    finally:
        driver.kill()
        driver.join()
        ours.close()


@contextmanager
def open_scorers(
    cluster: RayCluster, folder: Path, count: int, **environment: str
) -> Iterator[ActorPool]:
    """The scorers of a driver of their own, as a rank has them."""
    with (
        open_driver(cluster, folder, count, **environment) as (address, _),
        ActorPool(address, rank=0) as pool,
    ):
        yield pool
