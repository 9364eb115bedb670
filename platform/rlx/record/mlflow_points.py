"""The metric values that a run has in MLflow, beside those of the registry."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rlx.record.mlflow_client import MetricPoint, MirrorClient, MlflowRun, build_metric_point
from rlx.record.mlflow_tags import legal_key
from rlx_registry import MetricRow

__all__ = ["MlflowPoints", "compare_points"]


class MlflowPoints:
    """Cache of a run's metric values in MLflow; each metric is fetched at most once."""

    def __init__(self, client: MirrorClient, mlflow_run: MlflowRun) -> None:
        self._client = client
        self._run = mlflow_run
        self._steps: dict[str, dict[int, set[MetricPoint]]] = {}

    def has_conflict(self, rows: Sequence[MetricRow]) -> bool:
        """Whether MLflow has a different value at the step of one of these rows."""
        return any(
            points and build_metric_point(row) not in points
            for row in rows
            for points in [self._of(row.name).get(row.step)]
        )

    def add(self, rows: list[MetricRow]) -> None:
        """Adds values that have been sent."""
        for row in rows:
            self._of(row.name).setdefault(row.step, set()).add(build_metric_point(row))

    def _of(self, name: str) -> dict[int, set[MetricPoint]]:
        if name not in self._steps:
            key = legal_key(name)
            there = key in self._run.keys
            steps: dict[int, set[MetricPoint]] = {}
            for one in self._client.points(self._run.id, key) if there else ():
                steps.setdefault(one.step, set()).add(one)
            self._steps[name] = steps
        return self._steps[name]


def compare_points(
    client: MirrorClient, mlflow_run: MlflowRun, rows: Sequence[MetricRow]
) -> Iterator[str]:
    """Yields a sentence for each metric whose points in MLflow are not exactly these rows."""
    expected = defaultdict(set)
    for row in rows:
        expected[legal_key(row.name)].add(build_metric_point(row))
    for key in sorted({*expected, *mlflow_run.keys}):
        shown = client.points(mlflow_run.id, key) if key in mlflow_run.keys else []
        steps = sorted(point.step for point in expected[key].symmetric_difference(shown))
        if steps:
            yield (
                f"MLflow's {key} has {len(shown)} points and the registry's {len(expected[key])}; "
                f"they differ at step {steps[0]}"
            )
