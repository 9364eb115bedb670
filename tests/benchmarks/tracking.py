"""Telling MLflow a step's figures at once, as rlx's mirror does, beside one call for each."""

import tempfile
from itertools import count
from pathlib import Path

from harness import compared, in_turns, spent

from rlx.record.mlflow_client import MirrorClient
from rlx_registry import MetricRow

__all__ = ["record_vs_mlflow_calls"]

METRICS, STEPS, ROUNDS = 40, 5, 5


def record_vs_mlflow_calls() -> list[dict]:
    """Five steps of 40 metrics written into SQLite databases, each side into its own."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, own = (f"sqlite:///{Path(folder) / name}.db" for name in ("calls", "batches"))
        client = MirrorClient(own)
        run = client.create_run(client.experiment("bench", folder), "batches", 0.0, {})
        import mlflow  # after rlx has told it to be quiet

        mlflow.set_tracking_uri(theirs)
        mlflow.set_experiment("bench")
        values = {f"figures/{n}": n / 7 for n in range(METRICS)}
        told, called = count(), count()

        def batches() -> None:
            for step in (next(told) for _ in range(STEPS)):
                rows = [MetricRow(0, name, step, value, step) for name, value in values.items()]
                client.write_metrics(run, rows)

        def calls() -> None:
            for step in (next(called) for _ in range(STEPS)):
                for name, value in values.items():
                    mlflow.log_metric(name, value, step=step)

        with mlflow.start_run():
            took = in_turns(
                {"calls": lambda: spent(calls), "batches": lambda: spent(batches)}, ROUNDS
            )
    name = "record_vs_mlflow_calls"
    return [compared(name, took["calls"], took["batches"], "mlflow.log_metric for each value")]
