"""What a tracker such as MLflow is: one run in it, with a beginning, metrics and an end."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlx.errors import EnvironmentFault
from rlx_registry import EvaluationRecord, MetricRow, Registry, RunRecord


class TrackerUnavailableError(EnvironmentFault):
    """A tracker cannot be reached, or refused. Nothing is lost; the call can be repeated."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker shows of a run beside its metrics.

    Attributes:
        record: the run.
        groups: names of the groups that it belongs to.
        evaluations: its evaluations, without probes, whose figures are metrics too.
    """

    record: RunRecord
    groups: Sequence[str]
    evaluations: Sequence[EvaluationRecord]

    @classmethod
    def read(cls, registry: Registry, run_id: str) -> "TrackedRun":
        """Reads a run as it is now."""
        evaluations = registry.queries.evaluation_figures(run_id)
        plain = [one for one in evaluations if not one.suite.startswith("probe/")]
        return cls(registry.run(run_id), registry.list_run_groups(run_id), plain)


class Tracker(Protocol):
    """One run in one tracker. Every method raises only `TrackerUnavailableError`.

    Attributes:
        name: of its cursor in the registry.
        label: where it is, for messages; the same for all runs of one server or store.
    """

    name: str
    label: str

    def start(self, run: TrackedRun) -> bool:
        """Finds or creates the run and describes it; called again for each attempt.

        Returns:
            Whether the tracker has no metrics of it yet, so that it is sent all.
        """

    def add_metrics(self, rows: Sequence[MetricRow]) -> bool:
        """Adds values, some of which it may have been sent before.

        Returns:
            False if the tracker holds other values that it cannot change: it has dropped the run,
            which is to be started again and sent whole.
        """

    def finish(self, run: TrackedRun, files: Sequence[tuple[Path, str]]) -> None:
        """Sends files, each with its path in the run's folder, and the end of the run."""

    def has_run(self, run: RunRecord) -> bool:
        """Whether the tracker still has the run."""

    def discard(self, run: RunRecord) -> None:
        """Deletes the run, as far as the tracker deletes; does nothing if it has no such run."""
