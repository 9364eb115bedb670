"""The launcher `ray`: every rank is an actor of a Ray cluster.

Ray places the ranks, and notices when one of them, its machine or the driver is gone. This module
imports no Ray: what it must ask of a cluster, it asks in a process of its own.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.launch.launcher import Launcher
from rlx.launch.packages import list_packages
from rlx.plugin import SamplerPlugin
from rlx.spec import RayLauncherSpec, RunnerSpec, VllmSamplerSpec
from rlx.spec.reading import Diagnostic, build_error
from rlx.text import escape_unprintable

__all__ = [
    "SERVER_KIND",
    "Bundle",
    "Demand",
    "RayLauncher",
    "Shortage",
    "connect_to_cluster",
    "count_places",
    "find_shortage",
    "list_demands",
    "takes_gpus",
]

Bundle = dict[str, float]
"""Amounts of a node, a rank, a scorer or a server, by Ray's names of resources."""
SERVER_KIND = "vLLM servers"

PATIENCE = 60.0
"""Seconds in which a cluster must say which nodes it has."""
FRESH = 60.0
"""Seconds in which its answer is used again."""
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

Fields = tuple[str, ...]
"""The path of a field of the experiment."""

_PATH = ("runner", "launcher")
_ADDRESS = (*_PATH, "address")


@dataclass(frozen=True)
class Demand:
    """Actors of one kind that a run needs.

    Attributes:
        kind: what they are, in the plural.
        count: how many.
        bundle: what each takes.
        fields: the fields of the experiment that say what each takes, and how many there are.
    """

    kind: str
    count: int
    bundle: Bundle
    fields: tuple[Fields, Fields]


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

    def count_runs_at_once(self) -> int:
        """As many as the resources of a cluster are enough for; Ray has those wait that do not fit
        its nodes."""
        if self.settings.address == "local":
            return 1
        nodes = _query_nodes(self.settings.address)
        on_gpus = takes_gpus(self.runner, nodes)
        demands = list_demands(self.runner, self.sampler, on_gpus=on_gpus)
        names = {name for demand in demands for name in demand.bundle}
        return max(1, int(min((_count_times(nodes, demands, name) for name in names), default=1)))

    def build_command(self, folder: RunFolder, run_id: str) -> list[str]:
        driver = [sys.executable, "-m", "rlx.launch.ray_driver", str(folder.root), run_id]
        return [*driver, tempfile.gettempdir()]  # ranks have another one

    def _check_own_cluster(self) -> Iterator[Diagnostic]:
        for demand in list_demands(self.runner, self.sampler, on_gpus=False):
            for name in sorted(demand.bundle.keys() - OWN):
                message = f"a cluster with address local has no resource {name!r}"
                help_ = f"it has {', '.join(sorted(OWN))}; name the cluster that has {name!r}"
                yield build_error((*demand.fields[0], name), message, help_, against=_ADDRESS)
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
        on_gpus = takes_gpus(self.runner, nodes)
        demands = list_demands(self.runner, self.sampler, on_gpus=on_gpus)
        short = find_shortage(nodes, demands, self.settings.strategy)
        if short is not None and not self.settings.grows:
            path, count = (_PATH, ()) if short.demand is None else short.demand.fields
            yield build_error(
                path,
                f"the cluster can never hold {short.message}",
                *(f"a node has {_format_bundle(node)}" for node in nodes[:4]),
                f"lower {'.'.join(count) if count else 'the numbers'} or the resources, or set "
                "grows: true if it adds nodes",
                against=count,
                kind="machine",
            )


class Shortage(NamedTuple):
    """What the nodes of a cluster lack even if nothing else uses them.

    Attributes:
        message: what they cannot hold, and why, as in "2 ranks, each with CPU 4: there is room
            for 1".
        demand: the one that does not fit by itself; None if only all of them together do not.
    """

    message: str
    demand: Demand | None


def find_shortage(
    nodes: Sequence[Mapping[str, float]], demands: Sequence[Demand], strategy: str
) -> Shortage | None:
    """Finds a reason for which the nodes can never hold all demands; None if there is none.

    It places each kind by itself and adds up the resources of all. Kinds that fit by themselves
    and in sum, but not side by side on the nodes, are not found.

    Args:
        nodes: what each node has.
        demands: what the run takes.
        strategy: Ray's, of placement groups.
    """
    for demand in demands:
        places = count_places(nodes, demand.bundle, strategy)
        if places < demand.count:
            each = f"{demand.count} {demand.kind}, each with {_format_bundle(demand.bundle)}"
            return Shortage(f"{each}: there is room for {places}", demand)
    for name in sorted({name for demand in demands for name in demand.bundle}):
        need = sum(demand.count * demand.bundle.get(name, 0.0) for demand in demands)
        have = sum(node.get(name, 0.0) for node in nodes)
        if need > have:
            kinds = " and ".join(f"{demand.count} {demand.kind}" for demand in demands)
            sums = f"together they take {name} {need:g}, and it has {have:g}"
            return Shortage(f"{kinds}: {sums}", None)
    return None


def list_demands(
    runner: RunnerSpec, sampler: SamplerPlugin | None, *, on_gpus: bool
) -> list[Demand]:
    """What a run takes of a cluster: its ranks, and its scorers and vLLM servers if it has any.

    A rank takes its threads, on GPUs those that the sampler needs beside it, and what YAML names; a
    scorer as many processors as it has processes, and a server a processor and on GPUs those over
    which it splits the model, and what YAML names.
    """
    settings = runner.launcher
    assert isinstance(settings, RayLauncherSpec)
    gpus = (sampler.gpus_per_rank if sampler else 1) if on_gpus else 0
    taken: Bundle = {"CPU": runner.threads, "GPU": gpus, **settings.resources}
    fields: tuple[Fields, Fields] = ((*_PATH, "resources"), ("runner", "ranks"))
    demands = [Demand("ranks", runner.ranks, _drop_nothing(taken), fields)]
    if settings.scorers is not None:
        taken = {"CPU": runner.reward_workers, **settings.scorers.resources}
        own = (*_PATH, "scorers")
        fields = ((*own, "resources"), (*own, "count"))
        demands.append(Demand("scorers", settings.scorers.count, _drop_nothing(taken), fields))
    if isinstance(sampler, VllmSamplerSpec) and sampler.pool is not None:
        each = sampler.pool.tensor_parallel
        computing = {"GPU": each} if on_gpus else {"CPU": runner.threads * each}
        taken = {"CPU": 1, **computing, **settings.server_resources}
        fields = ((*_PATH, "server_resources"), ("sampler", "pool", "servers"))
        demands.append(Demand(SERVER_KIND, sampler.pool.servers, _drop_nothing(taken), fields))
    return demands


def takes_gpus(runner: RunnerSpec, nodes: Iterable[Mapping[str, float]]) -> bool:
    """Whether a run takes GPUs; as on one machine, `auto` takes them where there are any."""
    found = runner.device == "cuda" or any(node.get("GPU") for node in nodes)
    return found and runner.device != "cpu"


def _count_times(
    nodes: Sequence[Mapping[str, float]], demands: Sequence[Demand], name: str
) -> float:
    """How often all demands can take a resource, wherever it is."""
    need = sum(demand.count * demand.bundle.get(name, 0.0) for demand in demands)
    return sum(node.get(name, 0.0) for node in nodes) / need


def _drop_nothing(bundle: Bundle) -> Bundle:
    return {name: bundle[name] for name in sorted(bundle) if bundle[name]}


def count_places(nodes: Sequence[Mapping[str, float]], bundle: Bundle, strategy: str) -> int:
    """How many actors of one kind an idle cluster could hold.

    Args:
        nodes: what each node has.
        bundle: what each takes.
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
    """What each node of a cluster has, or had up to a minute ago: all runs of a group ask.

    Raises:
        EnvironmentFault: it cannot be reached, or does not answer.
    """
    return _query_nodes_once(address, time.monotonic() // FRESH)


@lru_cache(maxsize=1)
def _query_nodes_once(address: str, _: float) -> list[Bundle]:
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
