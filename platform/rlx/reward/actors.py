"""Has jobs run by scorers of a Ray cluster, which all ranks of a run share.

The driver of the run makes the scorers (`rlx.launch.ray_scorer`), and Ray places them, restarts one
that is lost, and asks it again. Each keeps worker processes as a rank does, so what a plugin may do
and what becomes of it is the same.
"""

import json
import os
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypedDict

from rlx.ray_client import find_actors, join_ray
from rlx.reward.job import describe_error
from rlx.reward.pool import JobPool
from rlx.reward.worker import ChunkReport
from rlx.reward.workers import RewardPool
from rlx.spec import RunnerSpec

__all__ = ["SCORERS", "ActorPool", "ScorersAddress", "open_job_pool"]

SCORERS = "RLX_SCORERS"
"""Environment variable of a rank with the address of its run's scorers as JSON, if it has any."""


class ScorersAddress(TypedDict):
    """Where the scorers of a run are.

    Attributes:
        cluster: HOST:PORT of the cluster's head.
        namespace: Ray's namespace that has their names.
        names: their names.
        width: number of chunks that each runs at the same time.
    """

    cluster: str
    namespace: str
    names: list[str]
    width: int


def open_job_pool(runner: RunnerSpec) -> JobPool:
    """Opens the workers of this rank: its run's scorers on a cluster, or processes of its own."""
    told = os.environ.get(SCORERS)
    if told is None:
        return RewardPool(workers=runner.reward_workers, memory_mb=runner.reward_memory_mb)
    return ActorPool(json.loads(told), int(os.environ.get("RANK", 0)))


class ActorPool(JobPool):
    """The scorers of a run.

    Args:
        address: where they are.
        rank: number of this rank; ranks begin with different scorers.
    """

    def __init__(self, address: ScorersAddress, rank: int) -> None:
        super().__init__(len(address["names"]) * address["width"])
        self._exit = ExitStack()
        self._exit.enter_context(join_ray(address["cluster"]))
        first = rank % len(address["names"])
        names = address["names"][first:] + address["names"][:first]
        self._scorers: list[Any] = find_actors(names, address["namespace"])
        self._asked: list[list[Future[ChunkReport]]] = [[] for _ in names]

    def close(self) -> None:
        """Leaves the cluster; the scorers stay until the driver of the run ends."""
        self._exit.close()

    def _send(self, payload: bytes, deadlines: tuple[float, ...]) -> "Future[ChunkReport]":
        self._asked = [[one for one in asked if not one.done()] for asked in self._asked]
        asked, scorer = min(zip(self._asked, self._scorers, strict=True), key=lambda s: len(s[0]))
        report: Future[ChunkReport] = scorer.run.remote(payload, deadlines).future()
        asked.append(report)
        return report

    def _require_workers(self) -> None:
        """Does nothing: Ray starts scorers again that are lost."""

    def _end_forgotten(self) -> None:
        """Does nothing: Ray forgets no chunk."""

    def _is_suspect(self, error: BaseException | None) -> bool:
        """Ray has asked a scorer as often as it may, and lost it each time. Another error of Ray's
        means that a scorer cannot be started again, or that the driver of the run is gone."""
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        if isinstance(error, RayError) and not isinstance(
            error, ActorUnavailableError | RayTaskError
        ):
            raise ConnectionError(f"a scorer is lost: {describe_error(error)}") from error
        return isinstance(error, ActorUnavailableError)
