"""Rescores the study's runs under the present rewards: `study.py --rescore`.

Only runs whose rollouts were recorded can be rescored. The result is stored in
experiments/study/rescored.json, from which the page says what moves.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx_command import ROOT, rlx

from rlx_registry import Registry

__all__ = ["FILE", "read_rescored", "rescore_runs"]

FILE = ROOT / "experiments" / "study" / "rescored.json"
TRAINED = ("advantages",)
"""Token streams that are reported besides the rewards."""


def rescore_runs(registry: Registry, labels: Mapping[str, str], file: Path = FILE) -> None:
    """Rescores every finished run of the recipes that has recorded rollouts, and adds the results.

    Args:
        registry: the registry of RLX_HOME.
        labels: the recipes' labels by the digests of their experiments.
        file: where the results are.
    """
    results = {(row["digest"], row["seed"]): row for row in read_rescored(file)}
    for run in registry.runs():
        if run.status != "finished" or run.digest not in labels:
            continue
        if not registry.results.rollout_steps(run.id):
            continue
        told = json.loads(rlx("rescore", run.id, "--json", quiet=True))
        results[run.digest, run.seed] = {
            "label": labels[run.digest],
            "digest": run.digest,
            "seed": run.seed,
            "steps": len(told["steps"]),
            "changes": [row for row in map(_describe_change, told["changes"]) if row],
        }
    if results:
        rows = [results[key] for key in sorted(results)]
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read_rescored(file: Path = FILE) -> list[dict[str, Any]]:
    """Returns the stored results, one per run; none if nothing was ever rescored."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def _describe_change(change: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the page shows of one figure; None for a figure that it does not show."""
    what = change["what"]
    if not what.startswith("reward ") and what not in TRAINED:
        return None
    return {
        "what": what.removeprefix("reward "),
        "unit": change["unit"],
        "n": change["n"],
        "changed": change["changed"],
        "before": change["before"] / change["n_before"] if change["n_before"] else None,
        "after": change["after"] / change["n_after"] if change["n_after"] else None,
    }
