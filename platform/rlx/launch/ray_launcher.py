"""The launcher `ray`: every rank is an actor of a Ray cluster.

Ray places the ranks, and notices when one of them, its machine or the driver is gone. This module
imports no Ray: what it must ask of a cluster, it asks in a process of its own.
"""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.launch.launcher import Launcher
from rlx.launch.packages import list_packages
from rlx.spec import RayLauncherSpec, RunnerSpec
from rlx.spec.reading import Diagnostic, build_error
from rlx.text import escape_unprintable

__all__ = ["Bundle", "RayLauncher", "build_bundle", "connect_to_cluster", "count_places"]

Bundle = dict[str, float]
"""Amounts of a node or of a rank, by Ray's names of resources."""

PATIENCE = 60.0
"""Seconds in which a cluster must say which nodes it has."""
REACH = 5.0
"""Seconds in which its address must accept a connection."""
OWN = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
"""The resources of a cluster on this machine alone."""
SOCKET_PATH = 107
"""Most characters of the path of a socket."""
SESSION = len("/rlx-0123456789-4194304-abcdefgh") + len(
    "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
"""Characters that the path of Ray's longest socket has below the folder of temporary files."""

_PATH = ("runner", "launcher")
_ADDRESS = (*_PATH, "address")


class RayLauncher(Launcher):
    """Starts each rank in an actor of a Ray cluster: one of the run's own, or one that exists."""

    @property
    def settings(self) -> RayLauncherSpec:
        """The section `runner.launcher`."""
        assert isinstance(self.runner.launcher, RayLauncherSpec)
        return self.runner.launcher

    def check(self) -> Iterator[Diagnostic]:
        """Yields why Ray is not usable here, or why its cluster cannot hold the ranks."""
        ray = list_packages()["ray"]
        if not ray.fits:
            message = f"launcher ray needs the package ray{ray.range}, found {ray.installed}"
            yield build_error(_PATH, message, "pip install 'rlx[ray]'", kind="machine")
        elif self.settings.address == "local":
            yield from self._check_own_cluster()
        else:
            yield from self._check_cluster()

    def count_ranks_here(self) -> int:
        return self.runner.ranks if self.settings.address == "local" else 0

    def build_command(self, folder: RunFolder, run_id: str) -> list[str]:
        driver = [sys.executable, "-m", "rlx.launch.ray_driver", str(folder.root), run_id]
        return [*driver, tempfile.gettempdir()]  # ranks have another one

    def _check_own_cluster(self) -> Iterator[Diagnostic]:
        for name in self.settings.resources.keys() - OWN:
            message = f"a cluster with address local has no resource {name!r}"
            help_ = f"it has {', '.join(sorted(OWN))}; name the cluster that has {name!r}"
            yield build_error((*_PATH, "resources", name), message, help_, against=_ADDRESS)
        folder = tempfile.gettempdir()
        if len(folder) + SESSION > SOCKET_PATH:
            message = f"the folder of temporary files, {folder}, is too long for Ray's sockets"
            help_ = f"set TMPDIR to a path of at most {SOCKET_PATH - SESSION} characters"
            yield build_error(_PATH, message, help_, kind="machine")

    def _check_cluster(self) -> Iterator[Diagnostic]:
        try:
            nodes = _query_nodes(self.settings.address)
        except EnvironmentFault as fault:
            yield build_error(_ADDRESS, str(fault), kind="machine")
            return
        bundle = build_bundle(self.runner, self.runner.device == "cuda")
        places, ranks = count_places(nodes, bundle, self.settings.strategy), self.runner.ranks
        if places < ranks and not self.settings.grows:
            taken = {name: bundle[name] for name in sorted(bundle)}
            yield build_error(
                (*_PATH, "resources"),
                f"the cluster can never hold {ranks} ranks, each with {_format_bundle(taken)}: "
                f"there is room for {places}",
                *(f"a node has {_format_bundle(node)}" for node in nodes[:4]),
                "lower runner.ranks or the resources, or set grows: true if it adds nodes",
                against=("runner", "ranks"),
                kind="machine",
            )


def build_bundle(runner: RunnerSpec, gpus: int) -> Bundle:
    """What a rank takes: its threads, `gpus` GPUs, and what YAML names."""
    assert isinstance(runner.launcher, RayLauncherSpec)
    bundle: Bundle = {"CPU": runner.threads, "GPU": gpus, **runner.launcher.resources}
    return {name: amount for name, amount in bundle.items() if amount}


def count_places(nodes: Sequence[Mapping[str, float]], bundle: Bundle, strategy: str) -> int:
    """How many ranks an idle cluster could hold.

    Args:
        nodes: what each node has.
        bundle: what each rank takes.
        strategy: Ray's, of placement groups.
    """
    each = [
        int(min((node.get(name, 0.0) / amount for name, amount in bundle.items()), default=1))
        for node in nodes
    ]
    if strategy == "STRICT_SPREAD":
        return sum(places > 0 for places in each)
    return max(each, default=0) if strategy == "STRICT_PACK" else sum(each)


def connect_to_cluster(address: str) -> None:
    """Tries whether something listens at an address: Ray itself would try for minutes.

    Raises:
        EnvironmentFault: nothing does.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentFault(f"no Ray cluster at {address}: {error}") from error


def _query_nodes(address: str) -> list[Bundle]:
    """What each node of a cluster has.

    Raises:
        EnvironmentFault: it cannot be reached, or does not answer.
    """
    connect_to_cluster(address)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rlx.launch.ray_cluster", address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            f"the Ray cluster at {address} did not answer in {PATIENCE:g} s"
        ) from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise EnvironmentFault(f"no Ray cluster at {address}: {escape_unprintable(reason)}")
    nodes: list[Bundle] = json.loads(lines[-1])
    return nodes


def _format_bundle(bundle: Mapping[str, float]) -> str:
    amounts = [f"{name} {amount:g}" for name, amount in bundle.items() if "node:" not in name]
    return ", ".join(amounts) or "nothing"
