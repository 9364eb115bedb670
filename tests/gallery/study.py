"""`make study`: what makes a small model know what it knows. See experiments/study/README.md.

    python tests/gallery/study.py [--page] [--only GROUP ...]

Trains what is missing of every group, evaluates every run, keeps what came of it in a small form
below experiments/study/results, and writes docs/study.md with its pictures. What is kept there, or
in RLX_HOME, is not run again: the same command goes on where it was stopped. `--page` only writes
the page.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlx_registry import Registry, RunRecord

ROOT = Path(__file__).parents[2]
STUDY = Path("experiments/study")
KEPT = ROOT / STUDY / "results"
SEEDS = "0..4"
AT_ONCE = max(1, (os.cpu_count() or 1))
METRICS = (
    "train/reward_answer",
    "train/advantage_abs_answer",
    "train/advantage_abs_confidence",
    "train/span_entropy",
    "rewards/accuracy/mean",
    "rewards/arithmetic/mean",
    "rewards/brier/mean",
    "calibration/alike_share",
    "calibration/brier",
    "calibration/conf_spread",
    "calibration/gap",
)
"""Curves that are kept; the others stay where the run was made."""
CHANGES = {"run", "moved", "grouped", "evaluation", "metrics"}
"""What is kept of a run's journal."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Runs of one group that differ in their seeds alone.

    Attributes:
        spec: the experiment's file, from the repository's root.
        sets: `path=value`, as `--set` takes them.
        seeds: as `--seeds` takes them.
        suite: what the trained models are asked besides the experiment's own questions.
    """

    spec: str
    sets: tuple[str, ...] = ()
    seeds: str = SEEDS
    suite: str | None = f"{STUDY}/suite.yaml"


def _arms(*names: str) -> tuple[Recipe, ...]:
    return tuple(Recipe(f"{STUDY}/{name}.yaml") for name in names)


def _shape(answers: int, confidences: int) -> Recipe:
    each = ("num_generations_answer", answers), ("num_generations_confidence", confidences)
    return Recipe(f"{STUDY}/center.yaml", tuple(f"rollout.{key}={n}" for key, n in each))


GROUPS: dict[str, tuple[Recipe, ...]] = {
    "study-arms": _arms("center", "sigma", "prompt_scale", "ema_scale", "coupled", "accuracy"),
    "study-shapes": (_shape(4, 4), _shape(2, 9), _shape(3, 6), _shape(6, 2)),
}
"""Every question's recipes, the one that the others are held against first."""


def main() -> None:
    """Runs what is missing, and writes the page."""
    from study_page import write

    parser = argparse.ArgumentParser(description="the study: runs, evaluations, and the page")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    asked = parser.parse_args()
    bring_back()
    for group in () if asked.page else asked.only:
        for recipe in GROUPS[group]:
            train(group, recipe)
        evaluate(group)
        keep(group)
    write()


def rlx(*arguments: str, quiet: bool = False) -> str:
    """What a command prints; progress goes to the terminal.

    Raises:
        SystemExit: it failed.
    """
    command = "import sys; from rlx.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"rlx {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}")
    if not quiet:
        print(done.stdout, end="", flush=True)
    return done.stdout


def registry() -> Registry:
    """The registry of RLX_HOME, to read."""
    from rlx.run.paths import tracking_url

    return Registry.open(tracking_url("sqlite:///{home}/registry.db"), read_only=True)


def train(group: str, recipe: Recipe) -> None:
    """Runs the seeds of a recipe that have not finished."""
    sets = [part for each in recipe.sets for part in ("--set", each)]
    seeds = ("--seeds", recipe.seeds, "--group", group, "--at-once", str(AT_ONCE))
    rlx("submit", recipe.spec, *seeds, *sets, "--set", "tracking.mlflow=null")


def finished(group: str) -> list[RunRecord]:
    """A group's runs that have finished."""
    with registry() as open_registry:
        return [r for r in open_registry.runs(group=group) if r.status == "finished"]


def evaluate(group: str) -> None:
    """Asks every run of a group what the suites ask that it has not been asked."""
    suites = {recipe.suite for recipe in GROUPS[group]} - {None}
    wanted = [
        ("eval", run.id, "--suite", str(suite), "-q")
        for suite in suites
        for run in finished(group)
        if not is_evaluated(run, Path(str(suite)))
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda arguments: rlx(*arguments, quiet=True), wanted):
            pass


def is_evaluated(run: RunRecord, suite: Path) -> bool:
    """Whether a run has answered every set of a suite."""
    from rlx.spec.suite import read_suite

    asked = read_suite(ROOT / suite)
    with registry() as open_registry:
        known = {e.suite for e in open_registry.evaluations(run.id)}
    return {f"suite/{asked.name}/{name}" for name in asked.sets} <= known


def keep(group: str) -> None:
    """Writes what came of a group's runs in a small form."""
    folder = KEPT / group
    folder.mkdir(parents=True, exist_ok=True)
    for run in finished(group):
        journal = Path(run.directory or "") / "journal.jsonl"
        if run.directory is None or not journal.exists():
            sys.exit(f"{run.id} has no journal: what came of it cannot be kept")
        lines = "".join(_small(journal)).encode()
        (folder / f"{run.digest}-{run.seed}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))


def _small(journal: Path) -> Iterator[str]:
    """Lines of a journal that tables and pictures are made of."""
    with journal.open(encoding="utf-8") as lines:
        for line in lines:
            said = json.loads(line)
            if said["change"] == "metrics":
                values = said["with"]["values"]
                said["with"]["values"] = {n: values[n] for n in METRICS if n in values}
            if said["change"] in CHANGES:
                yield json.dumps(said, separators=(",", ":")) + "\n"


def bring_back() -> None:
    """Makes runs that are kept and that RLX_HOME does not know known to its registry."""
    from rlx.run.paths import home

    folders = []
    for file in sorted(KEPT.glob("*/*.jsonl.gz")):
        folder = home() / "kept" / file.name.removesuffix(".jsonl.gz")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "journal.jsonl").write_bytes(gzip.decompress(file.read_bytes()))
        folders.append(str(folder))
    if folders:
        rlx("db", "import", *dict.fromkeys(folders), quiet=True)


if __name__ == "__main__":
    main()
