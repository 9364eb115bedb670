"""The scorers of a run: actors of Ray that run rewards and environments for all of its ranks.

Each keeps worker processes, as a rank without scorers does. Ray places them together with the
ranks. It starts one again that was lost with its process or its node, on a node that has room for
it, and asks it what the lost one had not answered.
"""

import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import ray
from pebble import ProcessExpired
from ray.exceptions import RayError

from rlx.home import REGISTRY, RunFolder
from rlx.launch.leftovers import open_temporary_folder
from rlx.launch.ray_reservation import Reservation
from rlx.reward import ChunkReport, ChunkWorkers, ScorersAddress, describe_worker_error
from rlx.spec import RunnerSpec
from rlx.text import escape_unprintable

__all__ = ["ScorerActor", "end_scorers", "require_scorers", "start_scorers"]

LOOK = 0.25
"""Seconds between two looks at what else the driver has to do."""
IMPORT = 60.0
"""Seconds for the import of a plugin in a fresh worker."""
LIVES = 3
"""Times that a chunk of jobs is sent to scorers that are lost while they run it; then its jobs are
sent one at a time, so that only the one that ends them fails."""
GRACE = 30.0
"""Seconds that scorers have to end what plugins have started."""
SECRET = frozenset({REGISTRY, "RLX_REGISTRY"})
"""Environment variables that may hold a password, and that scorers do not need."""


class _Order(TypedDict):
    """What a scorer needs to know."""

    folder: str
    cwd: str
    environment: dict[str, str]
    workers: int
    memory_mb: int


class ScorerActor:
    """Runs chunks of jobs in worker processes."""

    def __init__(self, order: _Order) -> None:
        self._exit, self._is_ending = ExitStack(), False
        temporary = self._exit.enter_context(
            open_temporary_folder(RunFolder(Path(order["folder"])))
        )
        own = order["environment"] | temporary
        os.environ.update(own)
        os.chdir(order["cwd"])
        # What a new interpreter would do; workers take over the path of this process.
        sys.path[:0] = [place for place in own.get("PYTHONPATH", "").split(os.pathsep) if place]
        # Workers import the main module of this process, which is one of Ray's and imports Ray.
        vars(sys.modules["__main__"]).pop("__file__", None)
        # Ray starts its processes with this signal blocked, which they would pass on.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._workers = ChunkWorkers(order["workers"], order["memory_mb"], IMPORT)

    def find_host(self) -> str:
        """The name of its machine."""
        return socket.gethostname()

    def run(self, payload: bytes, deadlines: tuple[float, ...]) -> ChunkReport:
        """Runs a chunk of pickled jobs, each with its deadline in seconds."""
        try:
            return self._workers.send(payload, deadlines).result()
        except ProcessExpired as error:
            return ChunkReport(fault=describe_worker_error(error))
        except (BrokenExecutor, RuntimeError):
            if not self._is_ending:  # its workers keep dying while idle
                os._exit(1)
            return ChunkReport(fault="the run has ended")

    def end(self) -> None:
        """Ends the workers and all that their plugins started."""
        self._is_ending = True
        self._workers.close()
        self._exit.close()


def start_scorers(
    reservation: Reservation, runner: RunnerSpec, folder: RunFolder, environment: dict[str, str]
) -> tuple[list[Any], ScorersAddress]:
    """Starts the scorers of a run; returns them, and where its ranks find them."""
    order: _Order = {  # which Ray keeps, to start a scorer again
        "folder": str(folder.root),
        "cwd": str(Path.cwd()),
        "environment": {k: v for k, v in environment.items() if k not in SECRET},
        "workers": runner.reward_workers,
        "memory_mb": runner.reward_memory_mb,
    }
    namespace = secrets.token_hex(8)
    names = [f"scorer-{number}" for number in range(reservation.count("scorers"))]
    actors = [
        reservation.start(
            "scorers",
            number,
            ScorerActor,
            order,
            name=name,
            namespace=namespace,
            # All that its ranks may send at once, and its end.
            max_concurrency=2 * runner.ranks * runner.reward_workers + 1,
            max_restarts=-1,
            max_task_retries=LIVES - 1,
        )
        for number, name in enumerate(names)
    ]
    cluster = str(ray.get_runtime_context().gcs_address)
    address: ScorersAddress = {
        "cluster": cluster,
        "namespace": namespace,
        "names": names,
        "width": runner.reward_workers,
    }
    return actors, address


def require_scorers(actors: list[Any], check: Callable[[], None]) -> None:
    """Waits until all scorers have started.

    Args:
        check: called while it waits; what it raises ends the wait.

    Raises:
        ConnectionError: one cannot start.
    """
    answers = [actor.find_host.remote() for actor in actors]
    waiting = list(answers)
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK)
        check()
    for number, answer in enumerate(answers):
        try:
            ray.get(answer)
        except RayError as error:
            why = escape_unprintable(str(error).strip().splitlines()[-1])
            raise ConnectionError(f"scorer {number} cannot start: {why}") from error


def end_scorers(actors: list[Any]) -> None:
    """Has the scorers end what plugins have started."""
    if actors:
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=GRACE)
