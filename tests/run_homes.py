"""What every home of small runs is asked for, whoever trains them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.launch import find_run_differences
from rlx_registry import Registry, RunRecord, read_body

RLCR = Path(__file__).parents[1] / "experiments" / "rlcr.yaml"
QUIET = {"tracking.mlflow": "null"}
"""What few tests ask for."""
TINY = {
    "model.hidden_size": 32,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.layers": 1,
    "model.intermediate_size": 32,
    "model.warm_start.steps": 100,
    "model.warm_start.warmup_steps": 10,
    "model.warm_start.learning_rate": "1e-2",
    "rollout.prompts_per_step": 4,
}
"""A model of seconds."""
MIRRORED = {
    **TINY,
    "model.warm_start.batch_size": 32,
    "phases.0.steps": 2,
    "phases.1.steps": 2,
    "rollout.num_generations_answer": 4,
    "rollout.num_generations_confidence": 4,
    "evaluation.problems": 30,
}
"""experiments/rlcr.yaml as a run of seconds, with its mirror and its pictures."""
SMALL = {**MIRRORED, **QUIET}


class ReadHome:
    """A home whose runs are read.

    Args:
        folder: where commands are called; the home is in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "home"

    def rlx(self, *arguments: Any) -> Any:
        """Calls a command."""
        raise NotImplementedError

    def json(self, *arguments: Any) -> Any:
        """What a command says as JSON; it must succeed."""
        done = self.rlx(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def registry(self) -> Registry:
        """Open for reading."""
        return Registry.open(f"sqlite:///{self.path}/registry.db", read_only=True)

    def run(self, run_id: str) -> RunRecord:
        """The record of a run."""
        with self.registry() as registry:
            return registry.run(run_id)

    def metrics(self, run_id: str) -> dict[str, list[tuple[int, float]]]:
        """The points of every curve of a run."""
        with self.registry() as registry:
            return registry.results.metrics(run_id)

    def events(self, run_id: str) -> list[Any]:
        """What a run has told."""
        with self.registry() as registry:
            return list(registry.results.events(run_id))

    def differences(self, one: str, other: str) -> list[str]:
        """What differs between the records of two runs."""
        with self.registry() as registry:
            return list(find_run_differences(registry, one, other))

    def check_record(self, run_id: str) -> dict[str, Any]:
        """A run's record holds together and is rescored to the bit; what `rlx check` says."""
        assert self.run(run_id).status == "finished", self.run(run_id).reason
        checked, rescored = self.json("check", run_id), self.json("rescore", run_id)
        assert checked["holds"] and not checked["unchecked"]
        assert rescored["same"], [c for c in rescored["changes"] if c["changed"]]
        return dict(checked)

    def bodies(self, run: RunRecord) -> Iterator[tuple[int, list[dict[str, Any]], Any]]:
        """Step, trees and index of every step, each file checked against its digest."""
        with self.registry() as registry:
            for step in registry.results.rollout_steps(run.id):
                body = registry.results.rollout_body(run.id, step)
                path = Path(run.directory) / body.path
                index = registry.results.rollout_index(run.id, step)
                yield step, read_body(path, body.sha256).to_pylist(), index
