"""`make shelf`: trains published ways of teaching a confidence on the same tasks, side by side.

    python experiments/shelf/shelf.py [--seeds 20..24] [--tasks urn] [--only WAY ...] [--page]

Trains one seed of one way at a time: first every way with the first seed, then with the next one.
What came of a run is stored in experiments/shelf/results and not repeated while the experiment
stays the same, so an interrupted command goes on where it stopped. Then it writes shelf.md and its
picture; `--page` only writes them.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "make"))
from rlx_command import ROOT, rlx
from rules import sample_answers
from shelf_page import write_page
from ways import SAMPLED, SETS, TASKS, WAYS, Way

from rlx_registry import Registry, RunRecord

SHELF = Path("experiments/shelf")
KEPT = ROOT / SHELF / "results"
UNTRACKED = {"tracking.mlflow": "null", "tracking.rollouts": "none"}
"""Tracking that the shelf does not need; it does not affect training."""


def main() -> None:
    """Runs what is missing and writes the page."""
    parser = argparse.ArgumentParser(description="the shelf: runs and the page")
    parser.add_argument("--seeds", default="20..24", help="first and last seed, as 20..24")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=[way.name for way in WAYS])
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(".."))
    ways = [way for way in WAYS if not options.only or way.name in options.only]
    for task in () if options.page else options.tasks:
        for seed in range(first, last + 1):
            for way in ways:
                if way.find_spec(task) is not None:
                    train_way(way, task, seed)
    write_page({(t, w.name): read_results(w, t) for t in TASKS for w in WAYS})


def train_way(way: Way, task: str, seed: int) -> None:
    """Trains one seed of one way, and stores what came of it, unless it is stored."""
    spec = way.find_spec(task)
    digest = compute_digest(ROOT / spec, SETS.get(task, ()))
    kept = KEPT / f"{task}-{way.name}-{seed}.json.gz"
    sampled = (task, way.name) in SAMPLED
    stored = read_result(kept) if kept.exists() else {}
    has_samples = "checks" in stored.get("samples", ())  # not in results of earlier versions
    if stored.get("digest") == digest and (has_samples or not sampled):
        return
    run = find_run(digest, seed)
    if run is None:
        sets = [f"--set={key}={value}" for key, value in UNTRACKED.items()]
        sets += [f"--set={override}" for override in SETS.get(task, ())]
        rlx("submit", spec, f"--set=seed={seed}", "--no-rehearsal", *sets)
        run = find_run(digest, seed)
    if run is None:
        sys.exit(f"{spec}, seed {seed}: no run has finished")
    KEPT.mkdir(exist_ok=True)
    result = {"digest": digest, "seed": seed, **collect_result(run)}
    text = json.dumps(result | ({"samples": sample_answers(run.id)} if sampled else {}))
    kept.write_bytes(gzip.compress(text.encode(), mtime=0))


def compute_digest(spec: Path, overrides: Sequence[str] = ()) -> str:
    """The digest of an experiment's runs, which does not depend on the seed."""
    from rlx.plan import check_file

    read, plugins = check_file(spec, overrides)
    return plugins.compute_digest(read.spec)


def find_run(digest: str, seed: int) -> RunRecord | None:
    """The finished run of an experiment and a seed in RLX_HOME; None if there is none."""
    with open_home() as registry:
        runs = [run for run in registry.runs() if (run.digest, run.seed) == (digest, seed)]
    return next((run for run in runs if run.status == "finished"), None)


def list_events(run: str) -> Sequence[Any]:
    """The events of a run."""
    with open_home() as registry:
        return registry.results.events(run)


def open_home() -> Registry:
    """The registry of RLX_HOME, which is created if there is none."""
    from rlx.home import tracking_url

    return Registry.open(tracking_url("sqlite:///{home}/registry.db"))


def collect_result(run: RunRecord) -> dict[str, Any]:
    """What the page needs of a run: its held-out answers, their figures, and what it cost."""
    from rlx import open_run

    told = json.loads(rlx("status", run.id, "--json", quiet=True))
    used = [e.payload or {} for e in list_events(run.id) if e.kind == "resources"]
    answers = open_run(run.id).answers()
    return {
        "after": told["evaluation"]["after"],
        "before": told["evaluation"]["before"],
        # An attempt that was killed has not said what it took.
        "cpu_seconds": sum(float(one["cpu_seconds"]) for one in used)
        if len(used) == run.attempt
        else None,
        "answers": {
            "problems": answers["problem_ids"].tolist(),
            "strata": answers["strata"].tolist(),
            "correct": answers["correct"].tolist(),
            "stated": [None if c != c else c for c in answers["confidence"]],
        },
    }


def read_results(way: Way, task: str) -> dict[int, dict[str, Any]]:
    """The stored results of a way, by seed."""
    results = [read_result(path) for path in sorted(KEPT.glob(f"{task}-{way.name}-*.json.gz"))]
    return {result["seed"]: result for result in results}


def read_result(path: Path) -> dict[str, Any]:
    """One stored result."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


if __name__ == "__main__":
    main()
