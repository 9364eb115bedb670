"""Hosts an environment in the reward workers, because it is as untrusted as a reward."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlx.plugin import Action, Environment, Step
from rlx.reward.job import EnvironmentCall
from rlx.reward.pool import JobPool
from rlx.rollout import HostFault

__all__ = ["PooledHost"]


class PooledHost:
    """Runs an environment in worker processes; a `rlx.rollout.EnvironmentHost`.

    Args:
        environment: the plugin.
        pool: the workers.
        deadline: seconds per call.
    """

    def __init__(self, environment: Environment, pool: JobPool, deadline: float) -> None:
        self._environment, self._pool, self._deadline = environment, pool, deadline

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        """Initial states; a `HostFault` for a call that raised, hung or crashed."""
        return self._run("reset", calls)

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        """Answers; a `HostFault` likewise, and for a result that is not a `Step`."""
        return self._run("step", calls)

    def _run(self, what: Literal["reset", "step"], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        jobs = [
            EnvironmentCall(self._environment, what, tuple(call), self._deadline) for call in calls
        ]
        return [
            outcome.value if outcome.fault is None else HostFault(outcome.fault)
            for outcome in self._pool.score(jobs)
        ]
