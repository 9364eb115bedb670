"""A run's ranks in a Ray cluster: each is the child of an actor, and one process leads all actors.

The supervisor starts it, as `python -m rlx.launch.ray_ranks FOLDER RUN_ID`, in place of the ranks,
and talks to it through a `LauncherInput`. What all ranks take is reserved in one placement group.
Ranks are numbered so that those of a node follow each other. If one ends otherwise than well, all
are ended, and the supervisor decides about another attempt. If this process is killed, Ray ends the
actors, and they their ranks. A rank is a process of its own, without Ray's threads and signals.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.launch.failures import describe_signal, write_failure, write_failure_reason
from rlx.launch.launcher import LauncherInput
from rlx.launch.processes import (
    find_free_port,
    find_network_interface,
    open_temporary_folder,
    stamp_output,
)
from rlx.launch.ray_launcher import require_cluster
from rlx.launch.run_access import load_resolved_spec
from rlx.progress import ProgressFile, print_to_log
from rlx.spec import ExperimentSpec, RayLauncherSpec

POLL_INTERVAL = 0.25
"""Seconds between two looks at what the supervisor says; longest wait for a rank's output."""
DESCENDANTS_GRACE = 5.0
"""Seconds that the processes which a rank started have to exit after it."""
_PIPE = 1 << 20
"""More bytes than a pipe holds."""


class RankPlace(NamedTuple):
    """Where an actor runs, with a free port, its GPUs by their tokens of CUDA_VISIBLE_DEVICES, and
    whether it sees the run's folder."""

    node: str
    host: str
    address: str
    port: int
    gpus: tuple[str, ...]
    sees_run: bool


class RankState(NamedTuple):
    """Whole lines that a rank has printed since the last poll, and its exit code once it ended."""

    output: bytes
    code: int | None


class RankActor:
    """Runs one rank of the run with this folder."""

    def __init__(self, folder: str) -> None:
        adopt_orphans()
        self._exit = ExitStack()
        self._folder = RunFolder(Path(folder))
        self._temporary = self._exit.enter_context(open_temporary_folder(self._folder))
        self._rest = b""
        self._is_stopped = False
        self._rank: subprocess.Popen[bytes] | None = None

    def find_place(self) -> RankPlace:
        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        address, sees_run = ray.util.get_node_ip_address(), self._folder.resolved_spec.exists()
        node, host = context.get_node_id(), socket.gethostname()
        return RankPlace(node, host, address, find_free_port(), gpus, sees_run)

    def start(self, run_id: str, cwd: str, environment: Mapping[str, str]) -> None:
        own = {**os.environ, **environment, **self._temporary, "RLX_SUPERVISOR": str(os.getpid())}
        if interface := find_network_interface(own["MASTER_ADDR"]):
            own.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Ray starts its processes with this signal blocked, which they would pass on.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._rank = subprocess.Popen(
            [sys.executable, "-m", "rlx.launch.rank", str(self._folder.root), run_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd if Path(cwd).is_dir() else None,
            env=own,
        )
        assert self._rank.stdout is not None
        os.set_blocking(self._rank.stdout.fileno(), False)

    def poll_rank(self, *, stop: bool) -> RankState:
        """Waits a moment for output or the end of the rank; `stop` asks it to end first."""
        assert self._rank is not None and self._rank.stdout is not None
        if stop and not self._is_stopped:
            self._is_stopped = True
            self._rank.terminate()
        select.select([self._rank.stdout], [], [], POLL_INTERVAL)
        return self._read_output(self._rank.poll())

    def end(self) -> RankState:
        """Ends the rank, if it has not ended, with all that it started and its files."""
        state = RankState(b"", None)
        if self._rank is not None:  # else a peer could not start
            code = self._rank.poll()
            self._rank.kill()
            self._rank.wait()
            kill_descendants(DESCENDANTS_GRACE if code is not None else 0.0)
            state = self._read_output(code)
        self._exit.close()
        return state

    def _read_output(self, code: int | None) -> RankState:
        assert self._rank is not None and self._rank.stdout is not None
        text = self._rest
        with suppress(BlockingIOError):  # there is no more now
            text += os.read(self._rank.stdout.fileno(), _PIPE)
        end = len(text) if code is not None else text.rfind(b"\n") + 1
        self._rest = text[end:]
        return RankState(text[:end], code)


POLLS_BEFORE_NOTICE = 20
"""Polls for room in the cluster before the log says that the run waits."""
END_GRACE = 30.0
"""Seconds that actors have to end their ranks."""
FORWARDED_PREFIXES = (
    *("RLX_", "OMP_", "PYTHON", "HF_", "TOKENIZERS_", "TRANSFORMERS_", "TORCH", "NCCL_", "GLOO_"),
    *("VLLM_", "PATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
)
"""Prefixes of the environment variables that ranks get from the supervisor's machine."""


class _NotWantedError(Exception):
    """The ranks are not wanted any more, before all of them have started."""


def run_ranks(folder: str, run_id: str) -> int:
    """Runs all ranks until they end; returns the exit code."""
    paths, given = RunFolder(Path(folder)), LauncherInput()
    try:
        spec = load_resolved_spec(paths)
        launcher = spec.runner.launcher
        assert isinstance(launcher, RayLauncherSpec)
        require_cluster(launcher.address)
        ray.init(launcher.address, log_to_driver=False, logging_level=logging.ERROR)
        with _reserve_places(spec, launcher, paths, given) as (group, bundle):
            ranks = _PlacedRanks(paths, given)
            try:
                ranks.start(group, bundle, spec.runner.ranks, run_id)
                ranks.follow()
            finally:
                ranks.end()
        return ranks.report()
    except _NotWantedError:
        return 1
    except Exception as error:
        write_failure(paths, error)
        raise


def _require_wanted(given: LauncherInput) -> None:
    given.receive()
    if given.stop or given.is_closed:
        raise _NotWantedError


@contextmanager
def _reserve_places(
    spec: ExperimentSpec, launcher: RayLauncherSpec, folder: RunFolder, given: LauncherInput
) -> Iterator[tuple[Any, dict[str, float]]]:
    """Reserves what all ranks take as soon as it is free: a run has all of it, or waits.

    Yields:
        Ray's placement group, and what each rank takes of it.
    """
    runner = spec.runner
    has_gpus = runner.device == "cuda" or "GPU" in ray.cluster_resources()
    bundle = {"CPU": float(runner.threads)}
    if has_gpus and runner.device != "cpu":
        bundle["GPU"] = 1.0
    group = placement_group([bundle] * runner.ranks, strategy=launcher.strategy)
    progress, polls = ProgressFile(folder.progress), 0
    try:
        while not group.wait(POLL_INTERVAL):
            _require_wanted(given)
            progress.show_activity("waiting for the cluster")
            polls += 1
            if polls == POLLS_BEFORE_NOTICE:
                nodes = [_format_amounts(n["Resources"]) for n in ray.nodes() if n["Alive"]]
                print_to_log(
                    f"waiting for room in the Ray cluster for {runner.ranks} ranks, each with "
                    f"{_format_amounts(bundle)}; its nodes have {'; '.join(nodes)}"
                )
        yield group, bundle
    finally:
        with suppress(RayError):
            remove_placement_group(group)


def _format_amounts(amounts: dict[str, float]) -> str:
    shown = {k: v for k, v in amounts.items() if not k.startswith(("node:", "memory", "object_st"))}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"


class _PlacedRanks:
    """The actors of all ranks, numbered when they start."""

    def __init__(self, folder: RunFolder, given: LauncherInput) -> None:
        self._folder, self._given = folder, given
        self._actors: list[Any] = []
        self._places: list[RankPlace] = []
        self._codes: dict[int, int] = {}
        self._lost: dict[int, RayError] = {}

    def start(self, group: Any, bundle: dict[str, float], count: int, run_id: str) -> None:
        """Starts the actors, numbers the ranks and starts them, unless an actor is lost.

        Raises:
            EnvironmentFault: a node does not see the run's folder.
        """
        placed = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        for number in range(count):
            there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            remote = ray.remote(RankActor).options(scheduling_strategy=there, **placed)
            self._actors.append(remote.remote(str(self._folder.root)))
        found = self._ask([actor.find_place.remote() for actor in self._actors])
        if self._lost:
            return
        for place in found:
            if not place.sees_run:
                raise EnvironmentFault(
                    f"{place.host} does not see {self._folder.root}: RLX_HOME must be on a disk "
                    "that all nodes of the Ray cluster share"
                )
        here = ray.get_runtime_context().get_node_id()
        nodes = list(dict.fromkeys([here, *(place.node for place in found)]))
        order = sorted(range(count), key=lambda number: (nodes.index(found[number].node), number))
        self._actors = [self._actors[number] for number in order]
        self._places = [found[number] for number in order]
        own = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED_PREFIXES)}
        environments = _build_rank_environments(self._places)
        cwd, pairs = str(Path.cwd()), zip(self._actors, environments, strict=True)
        self._ask([actor.start.remote(run_id, cwd, {**own, **one}) for actor, one in pairs])

    def _ask(self, answers: Sequence[Any]) -> list[Any]:
        """Waits for the answers of all actors; those that have none are lost."""
        done: list[Any] = []
        while len(done) < len(answers):
            done, _ = ray.wait(list(answers), num_returns=len(answers), timeout=POLL_INTERVAL)
            _require_wanted(self._given)
        found = []
        for rank, answer in enumerate(answers):
            try:
                found.append(ray.get(answer))
            except RayError as error:
                self._lost[rank] = error
        return found

    def follow(self) -> None:
        """Prints what the ranks print, until all have ended, or one otherwise than well."""
        polls = {} if self._lost else {self._poll_rank(n): n for n in range(len(self._actors))}
        while polls and not self._has_failed() and not self._given.is_closed:
            self._given.receive()
            for poll in ray.wait(list(polls), timeout=POLL_INTERVAL)[0]:
                rank = polls.pop(poll)
                if self._take(rank, poll) and rank not in self._codes:
                    polls[self._poll_rank(rank)] = rank

    def end(self) -> None:
        """Ends all ranks; those that have ended already have their codes."""
        ends = {actor.end.remote(): rank for rank, actor in enumerate(self._actors)}
        if ends:
            for end in ray.wait(list(ends), num_returns=len(ends), timeout=END_GRACE)[0]:
                self._take(ends[end], end)

    def report(self) -> int:
        """Writes why the ranks ended, unless a rank has; returns the exit code."""
        killed, why = [code for code in self._codes.values() if code < 0], ""
        if self._lost:
            why = self._describe_loss(*next(iter(self._lost.items())))
        elif killed and not self._given.stop:
            why = f"a rank was {describe_signal(-killed[0])}"
        if why:
            write_failure_reason(self._folder, why, replaces=True)
        return int(self._has_failed())

    def _poll_rank(self, rank: int) -> Any:
        return self._actors[rank].poll_rank.remote(stop=self._given.stop)

    def _take(self, rank: int, answer: Any) -> bool:
        """Prints what an actor has answered; returns whether it is there."""
        try:
            state: RankState = ray.get(answer)
        except RayError as error:
            self._lost.setdefault(rank, error)
            return False
        text = state.output
        with suppress(OSError):  # the log's disk may be full
            while text:
                text = text[os.write(1, text) :]
        if state.code is not None:
            self._codes[rank] = state.code
        return True

    def _has_failed(self) -> bool:
        return bool(self._lost) or any(self._codes.values())

    def _describe_loss(self, rank: int, error: RayError) -> str:
        host = self._places[rank].host if self._places else "its node"
        if isinstance(error, RayTaskError):
            cause = error.cause
            return f"rank {rank} cannot start on {host}: {type(cause).__name__}: {cause}"
        if "its node has died" in str(error):
            return f"the node of rank {rank}, {host}, was lost: it crashed, left or is unreachable"
        # Ray may notice the end of the actor before that of its node.
        return (
            f"the actor of rank {rank} on {host} was lost: it, or its node, crashed or was killed"
        )


def _build_rank_environments(places: Sequence[RankPlace]) -> Iterator[dict[str, str]]:
    """The environment of torch.distributed of each rank. Ranks of a node see its GPUs, the first of
    each first."""
    for rank, place in enumerate(places):
        beside = [n for n, other in enumerate(places) if other.node == place.node]
        gpus = zip(*(places[n].gpus for n in beside), strict=True)
        yield {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].port),
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for nth in gpus for gpu in nth),
        }


if __name__ == "__main__":
    from rlx.launch import ray_ranks  # where the nodes find the actors' class, not in __main__

    stamp_output()
    sys.exit(ray_ranks.run_ranks(*sys.argv[1:]))
