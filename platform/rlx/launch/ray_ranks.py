"""The ranks of a run as actors of the Ray cluster that this process has joined.

What all ranks take is reserved in one placement group. The actors say where they are, and ranks are
numbered so that those of a node follow each other. If one ends otherwise than well, all are ended.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.launch.failures import describe_signal
from rlx.launch.multi_node import FORWARDED_PREFIXES
from rlx.launch.node import keep_failure, write_end_reason
from rlx.launch.ray_actor import build_order, end_actors, require_actors
from rlx.launch.ray_cluster import list_nodes
from rlx.launch.ray_folders import build_home_environment, leave_mark, read_start_files
from rlx.launch.ray_head import HeadWatch
from rlx.launch.ray_launcher import (
    Demand,
    count_places,
    find_shortage,
    list_demands,
    takes_gpus,
)
from rlx.launch.ray_orders import Orders
from rlx.launch.ray_rank import RankActor, RankOrder, RankPlace, RankState
from rlx.launch.ray_reservation import Reservation, reserve_places
from rlx.launch.ray_scorers import start_scorers
from rlx.launch.ray_servers import start_servers
from rlx.reporting import print_to_log
from rlx.reward import SCORERS
from rlx.run import ProgressFile
from rlx.sampler import SERVERS
from rlx.spec import ExperimentSpec, RayLauncherSpec
from rlx_registry import StoredFolder

__all__ = ["run_ranks"]

LOOK = 0.25
"""Seconds between two looks at the orders."""
PROMPT = 20
"""Looks for room in the cluster before a run says that it waits."""
GRACE = 30.0
"""Seconds that actors have to end their ranks, and Ray to know why an actor is gone."""


def run_ranks(spec: ExperimentSpec, folder: RunFolder, run_id: str, orders: Orders) -> int:
    """Runs all ranks until they end; returns the exit code."""
    on_gpus = takes_gpus(spec.runner, list_nodes())
    demands = list_demands(spec.runner, spec.sampler, on_gpus=on_gpus)
    own = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED_PREFIXES)}
    address = str(ray.get_runtime_context().gcs_address)
    log = partial(print_to_log, out=sys.stdout)  # whatever stdout is later
    watch = _RankWatch(orders, HeadWatch(address, log, partial(_replace_reason, folder)))
    first_here = StoredFolder.find(folder.root) is not None  # no other node sees its working folder
    if first_here:
        _require_place_here(demands[0])
    strategy = _settings(spec).strategy
    with reserve_places(demands, strategy, watch.head, first_here=first_here) as reservation:
        _await_room(reservation, spec, folder, watch)
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # of Ray
            return _run_placed_ranks(reservation, spec, folder, run_id, watch, own)


def _require_place_here(ranks: Demand) -> None:
    """Raises an error unless this node has what a rank takes."""
    own = ray.get_runtime_context().get_node_id()
    here = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == own)
    if not count_places([here], ranks.bundle, "PACK"):
        raise EnvironmentFault(
            "RLX_HOME is in an object store: rank 0 must be on the supervisor's node, which "
            f"has no place for a rank: {socket.gethostname()}; submit on one that has, or name a "
            "shared disk"
        )


def _run_placed_ranks(
    reservation: Reservation,
    spec: ExperimentSpec,
    folder: RunFolder,
    run_id: str,
    watch: "_RankWatch",
    environment: dict[str, str],
) -> int:
    order = build_order(folder, environment)
    scorers, scoring = start_scorers(reservation, spec.runner, order)
    servers, serving = start_servers(reservation, spec.runner, order, _count_ahead(spec))
    addresses = {SCORERS: scoring, SERVERS: serving}
    told = {name: json.dumps(address) for name, address in addresses.items() if address}
    try:
        require_actors("scorer", scorers, watch.check_start)
        require_actors("vLLM server", servers, watch.check_start)
        ranks = _PlacedRanks(folder, watch)
        try:
            ranks.start(reservation, run_id, environment | told)
            ranks.follow()
        finally:
            ranks.end()
    finally:
        end_actors([*scorers, *servers])
    return ranks.report()


def _count_ahead(spec: ExperimentSpec) -> int:
    """The largest number of steps of any phase whose rollouts are in flight."""
    phases = [spec.resolve_phase_spec(phase) for phase in spec.phases]
    return max(phase.rollout.off_policy_steps for phase in phases)


def _settings(spec: ExperimentSpec) -> RayLauncherSpec:
    assert isinstance(spec.runner.launcher, RayLauncherSpec)
    return spec.runner.launcher


def _await_room(
    reservation: Reservation, spec: ExperimentSpec, folder: RunFolder, watch: "_RankWatch"
) -> None:
    """Waits until the cluster has reserved what the run takes.

    A run that waits for others makes progress. One that the nodes cannot hold, because some have
    left, does not, and `runner.hang_after` limits how long it waits for them to return.
    """
    settings, progress = _settings(spec), ProgressFile(folder.progress)
    looks = 0
    while not reservation.wait(LOOK):
        watch.check_start()
        if watch.head.is_silent:
            continue
        nodes, looks = list_nodes(), looks + 1
        short = find_shortage(nodes, reservation.demands, settings.strategy)
        if looks == PROMPT:
            why = "" if short is None else f", whose nodes cannot hold {short.message}"
            print_to_log(f"waiting for room in the Ray cluster{why}")
        if settings.grows or short is None:
            progress.show_activity("waiting for the cluster")


class _RankWatch(NamedTuple):
    """What may end the ranks besides themselves."""

    orders: Orders
    head: HeadWatch

    def check_start(self) -> None:
        """For whoever waits for the ranks to start: raises what ends the wait."""
        self.orders.require_start()
        self.head.check()


class _PlacedRanks:
    """The actors of all ranks, numbered when they start."""

    def __init__(self, folder: RunFolder, watch: _RankWatch) -> None:
        self._folder, self._orders, self._head = folder, watch.orders, watch.head
        self._check_start = watch.check_start
        self._actors: list[Any] = []
        self._places: list[RankPlace] = []
        self._codes: dict[int, int] = {}
        self._lost: dict[int, RayError] = {}

    def start(self, reservation: Reservation, run_id: str, environment: dict[str, str]) -> None:
        """Numbers the ranks and starts them, unless an actor is lost.

        Raises:
            EnvironmentFault: no node with a rank sees the run's folder.
        """
        run = str(self._folder.root)
        with leave_mark(self._folder) as mark:
            self._actors = [
                reservation.start("ranks", number, RankActor, run, mark, max_restarts=0)
                for number in range(reservation.count("ranks"))
            ]
            found = self._ask([actor.find_place.remote() for actor in self._actors])
        if self._lost:
            return
        self._number_ranks(found)
        files, commands = read_start_files(self._folder), []
        environments = _build_rank_environments(self._places)
        for actor, place, own in zip(self._actors, self._places, environments, strict=True):
            is_apart = place.folder != run
            own |= build_home_environment(place.folder, place.node) if is_apart else {}
            command: RankOrder = {
                "folder": place.folder,
                "files": files if is_apart else {},
                "run_id": run_id,
                "cwd": str(Path.cwd()),
                "environment": {**environment, **own},
            }
            commands.append(actor.start.remote(command))
        self._ask(commands)

    def _number_ranks(self, found: list[RankPlace]) -> None:
        """Numbers those of a node one after the other, and before all others those that see the
        run's folder, of which this node's are the first."""
        here, run = ray.get_runtime_context().get_node_id(), str(self._folder.root)
        nodes = list(dict.fromkeys([here, *(place.node for place in found)]))

        def rank(number: int) -> tuple[bool, int, int]:
            return found[number].folder != run, nodes.index(found[number].node), number

        order = sorted(range(len(found)), key=rank)
        self._actors = [self._actors[n] for n in order]
        firsts = {found[n].node: found[n].folder for n in reversed(order)}
        self._places = [found[n]._replace(folder=firsts[found[n].node]) for n in order]
        if self._places[0].folder != run:
            raise EnvironmentFault(
                f"no node with a rank sees {run}: one of the ranks must be on the machine where "
                "you submit, or RLX_HOME on a disk that a rank's node shares"
            )

    def follow(self) -> None:
        """Prints what the ranks print, until all have ended, or one otherwise than well.

        Raises:
            HeadLostError: the head of the cluster is lost, alone or with an actor.
        """
        looks = {} if self._lost else {self._poll_rank(n): n for n in range(len(self._actors))}
        while looks and not self._has_failed() and not self._orders.is_orphan():
            self._head.check()
            for look in ray.wait(list(looks), timeout=LOOK)[0]:
                rank = looks.pop(look)
                if self._take(rank, look) and rank not in self._codes:
                    looks[self._poll_rank(rank)] = rank
        if self._lost:  # without its head, Ray does not know why
            self._head.require_answer()

    def end(self) -> None:
        """Ends all ranks; those that have ended already have their codes."""
        ends = {actor.end.remote(): rank for rank, actor in enumerate(self._actors)}
        done, _ = ray.wait(list(ends), num_returns=len(ends), timeout=GRACE)
        for end in done:
            self._take(ends[end], end)

    def report(self) -> int:
        """Writes why the ranks ended, unless a rank has; returns the exit code."""
        killed = [code for code in self._codes.values() if code < 0]
        if self._lost:
            _replace_reason(self._folder, self._describe_loss(*next(iter(self._lost.items()))))
        elif killed and not self._orders.stop:
            _replace_reason(self._folder, f"a rank was {describe_signal(-killed[0])}")
        return int(self._has_failed())

    def _ask(self, answers: Sequence[Any]) -> list[Any]:
        """Waits for the answers of all actors; those that have none are lost."""
        done: list[Any] = []
        while len(done) < len(answers):
            done, _ = ray.wait(list(answers), num_returns=len(answers), timeout=LOOK)
            self._check_start()
        found = []
        for rank, answer in enumerate(answers):
            try:
                found.append(ray.get(answer))
            except RayError as error:
                self._lost[rank] = error
        return found

    def _poll_rank(self, rank: int) -> Any:
        return self._actors[rank].poll_rank.remote(stop=self._orders.stop)

    def _take(self, rank: int, answer: Any) -> bool:
        """Prints what an actor has answered; returns whether it is there."""
        try:
            state: RankState = ray.get(answer)
        except RayError as error:
            self._lost.setdefault(rank, error)
            return False
        _write_to_log(state.output)
        if state.failure:
            self._take_failure(json.loads(state.failure))
        if state.code is not None:
            self._codes[rank] = state.code
        return True

    def _take_failure(self, failure: dict[str, Any]) -> None:
        """Writes why a rank failed that does not see the run's folder. Its peers, who do, have
        written that they lost it, if it was the first."""
        if not failure["again"] or not any(self._codes.values()):
            _remove_passing_reason(self._folder)
        keep_failure(self._folder, failure)

    def _has_failed(self) -> bool:
        return bool(self._lost) or any(self._codes.values())

    def _describe_loss(self, rank: int, error: RayError) -> str:
        """Why an actor is gone; at first, Ray may know only that it does not answer."""
        if isinstance(error, ActorUnavailableError):
            try:
                ray.get(self._actors[rank].find_place.remote(), timeout=GRACE)
            except RayError as later:
                error = later
        host = self._places[rank].host if self._places else "its node"
        return _describe_lost_actor(rank, host, error)


def _describe_lost_actor(rank: int, host: str, error: RayError) -> str:
    """Says in plain words why the actor of a rank is gone."""
    if isinstance(error, RayTaskError):
        return f"rank {rank} cannot start on {host}: {type(error.cause).__name__}: {error.cause}"
    if "its node has died" in str(error):
        return f"the node of rank {rank}, {host}, was lost: it crashed, left or cannot be reached"
    if isinstance(error, ActorUnavailableError | GetTimeoutError):
        return f"the actor of rank {rank} on {host} does not answer"
    return f"the actor of rank {rank} on {host} was killed or crashed"


def _write_to_log(text: bytes) -> None:
    with suppress(OSError):  # the log's disk may be full
        while text:
            text = text[os.write(1, text) :]


def _build_rank_environments(places: Sequence[RankPlace]) -> Iterator[dict[str, str]]:
    """What torchrun would tell each rank. Ranks of a node see its GPUs, the first of each first."""
    for rank, place in enumerate(places):
        beside = [other for other in places if other.node == place.node]
        first = next(n for n, other in enumerate(places) if other.node == place.node)
        each = zip(*(other.gpus for other in beside), strict=True)
        yield {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(rank - first),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].port),
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for some in each for gpu in some),
        }


def _replace_reason(folder: RunFolder, message: str) -> None:
    """Writes why the ranks ended, in place of what their peers have taken it for."""
    _remove_passing_reason(folder)
    write_end_reason(folder, message, 1, again=True)


def _remove_passing_reason(folder: RunFolder) -> None:
    """Removes why the ranks ended, unless it is an error of rlx, which would occur again."""
    with suppress(FileNotFoundError):
        if json.loads(folder.failure.read_text())["again"]:
            folder.failure.unlink()
