"""The scorers of a run: actors of Ray that run rewards and environments for all of its ranks.

Each keeps worker processes, as a rank without scorers does. Ray places them together with the
ranks. It starts one again that was lost with its process or its node, on a node that has room for
it, and asks it what the lost one had not answered.
"""

import os
import secrets
import socket
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from typing import Any

import ray
from pebble import ProcessExpired

from rlx.launch.ray_actor import ActorOrder, enter_run
from rlx.launch.ray_reservation import Reservation
from rlx.reward import ChunkReport, ChunkWorkers, ScorersAddress, describe_worker_error
from rlx.spec import RunnerSpec

__all__ = ["ScorerActor", "start_scorers"]

IMPORT = 60.0
"""Seconds for the import of a plugin in a fresh worker."""
LIVES = 3
"""Times that a chunk of jobs is sent to scorers that are lost while they run it; then its jobs are
sent one at a time, so that only the one that ends them fails."""


class _ScorerOrder(ActorOrder):
    """What a scorer needs to know besides."""

    workers: int
    memory_mb: int


class ScorerActor:
    """Runs chunks of jobs in worker processes."""

    def __init__(self, order: _ScorerOrder) -> None:
        self._exit, self._is_ending = ExitStack(), False
        enter_run(order, self._exit)
        self._workers = ChunkWorkers(order["workers"], order["memory_mb"], IMPORT)

    def find_host(self) -> str:
        """The name of its machine."""
        return socket.gethostname()

    def run(self, payload: bytes, deadlines: tuple[float, ...]) -> ChunkReport:
        """Runs a chunk of pickled jobs, each with its deadline in seconds."""
        try:
            return self._workers.run(payload, deadlines)
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
    reservation: Reservation, runner: RunnerSpec, shared: ActorOrder
) -> tuple[list[Any], ScorersAddress | None]:
    """Starts the scorers of a run, if it has any; returns them, and where its ranks find them."""
    count = reservation.count("scorers")
    if not count:
        return [], None
    order: _ScorerOrder = {
        **shared,
        "workers": runner.reward_workers,
        "memory_mb": runner.reward_memory_mb,
    }
    namespace = secrets.token_hex(8)
    names = [f"scorer-{number}" for number in range(count)]
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
