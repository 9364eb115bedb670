"""Runs with a row in every table of the registry, written through its public methods."""

from pathlib import Path

from rlx_registry import DeviceRequest, Registry, RolloutIndex

__all__ = ["fill"]

ODD = "3 + 4 é \u202e'; DROP TABLE rlx_run;--\n\x1b[31m"
"""Text as a model may write it."""
ANSWER = RolloutIndex(
    row=0, parent_row=None, tree=0, group=0, turn="answer", problem_id="p7", reward=1.1,
    rewards={"accuracy": 1.0, "brier": None}, advantage=0.5, n_tokens=12, finish_reason="stop",
    preview=ODD,
)  # fmt: skip
CONFIDENCE = RolloutIndex(
    row=1, parent_row=0, tree=0, group=0, turn="confidence", problem_id="p7", reward=None,
    advantage=-0.1, n_tokens=3, finish_reason="length", preview="0.9", failed="timeout",
)  # fmt: skip


def fill(registry: Registry, home: Path) -> None:
    """Makes five runs: one crashed, was resumed and finished; others are stopped, submitted,
    running on a device and asked to stop, and queued. Two belong to groups."""
    for seed, name in enumerate(("rlcr", "rlcr", "kg", "kg", "kg")):
        spec = {"model": {"kind": "tiny"}, "loss": {"clip": [0.2, 0.28]}, "said": ODD}
        code = {"commit": "abc", "dirty": False}
        run, _ = registry.submit(
            digest=f"{seed:064d}", seed=seed, name=name, spec=spec, yaml=f"name: {name}\n",
            plugins=[{"name": "countdown", "version": "0.1.0"}], code=code,
            environment={"torch": "2.13", "devices": 1}, queue=seed == 4,
        )  # fmt: skip
        registry.update_run(run.id, directory=home / "runs" / run.id)
    for run_id, group in (("2", "rlcr-seeds"), ("1", "rlcr-seeds"), ("1", ODD)):
        registry.join(run_id, group)
    registry.update_run("1", origins={"model.kind": "rlcr.yaml:3", "said": "default"})
    registry.update_run("1", steps_total=2, pid=7, phase="main", mlflow_run_id="m1")
    registry.transition("1", ["submitted"], "running")
    _write_steps(registry, "1", 1, 2)
    registry.transition("1", ["running"], "failed", "killed by signal 9")
    registry.transition("1", ["failed"], "running", "resumed")
    _write_steps(registry, "1", 2, 3)
    registry.results.add_evaluation(
        "1", 2, "after", "test", 600, {"accuracy": 0.6}, {"bins": [1, 2]}
    )
    for target, seq in (("mlflow", 4), ("mlflow-files", 2), ("mlflow-end", 5)):
        registry.results.set_mirror_cursor("1", target, seq)
    registry.update_run("1", step=2, mlflow_experiment_id="1", phase=None)
    registry.transition("1", ["running"], "finished")
    registry.transition("2", ["submitted"], "running")
    registry.results.add_metrics("2", 1, {"train/loss": 3.25, "train/kl": float("nan")})
    registry.transition("2", ["running"], "stopped", "asked to")
    registry.update_run("4", host="one", pid=8)
    registry.start("4", ["submitted"], devices=DeviceRequest("one", ("gpu:0", "gpu:1"), 1))
    registry.leave_request("4", "stop")


def _write_steps(registry: Registry, run_id: str, first: int, end: int) -> None:
    for step in range(first, end):
        place = {"path": f"rollouts/step_{step:06d}.parquet", "sha256": f"{step:064d}", "bytes": 10}
        statistics = {"rows": 2, "std": None}
        registry.results.add_rollouts(
            run_id, step, **place, statistics=statistics, index=[ANSWER, CONFIDENCE]
        )
        registry.results.add_metrics(
            run_id, step, {"train/loss": 0.5 / step, "reward/mean": 0.1 + step}
        )
        registry.results.add_checkpoint(run_id, step, f"checkpoints/{step}", 2**40, f"{step:064x}")
        registry.results.add_artifact(run_id, "spec.yaml", "spec")
        registry.results.add_artifact(run_id, f"calibration_{step}.png", "picture")
        registry.results.add_event(run_id, "note", ODD, {"step": step, "figures": [1.5, None]})
        registry.results.add_evaluation(
            run_id, step, "step", "test", 60, {"accuracy": 0.5, "auroc": None}
        )
        registry.heartbeat(run_id)
