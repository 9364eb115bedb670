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
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import ray
from pebble import ProcessExpired

from rlx.home import RunFolder
from rlx.launch.leftovers import open_temporary_folder
from rlx.launch.ray_reservation import Reservation
from rlx.reward import ChunkReport, ChunkWorkers, ScorersAddress, describe_worker_error
from rlx.spec import RunnerSpec

__all__ = ["ScorerActor", "end_scorers", "start_scorers"]

IMPORT = 60.0
"""Seconds for the import of a plugin in a fresh worker."""
LIVES = 3
"""Times that a chunk of jobs is sent to scorers that are lost while they run it; then its jobs are
sent one at a time, so that only the one that ends them fails."""
GRACE = 30.0
"""Seconds that scorers have to end what plugins have started."""


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
        self._exit = ExitStack()
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
        except (BrokenExecutor, RuntimeError):  # its workers keep dying while idle
            os._exit(1)

    def end(self) -> None:
        """Ends the workers and all that their plugins started."""
        self._workers.close()
        self._exit.close()


def start_scorers(
    reservation: Reservation, runner: RunnerSpec, folder: RunFolder, environment: dict[str, str]
) -> tuple[list[Any], ScorersAddress]:
    """Starts the scorers of a run; returns them, and where its ranks find them."""
    order: _Order = {
        "folder": str(folder.root),
        "cwd": str(Path.cwd()),
        "environment": environment,
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
            max_concurrency=4 * runner.reward_workers,
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


def end_scorers(actors: list[Any]) -> None:
    """Has the scorers end what plugins have started."""
    if actors:
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=GRACE)
