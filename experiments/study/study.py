"""`make study`: what makes a small model know what it knows. See experiments/study/README.md.

    python experiments/study/study.py [--page] [--only GROUP ...]

Trains what is missing of every group, evaluates every run, keeps what came of it in a small form
below experiments/study/results, and writes docs/study.md with its pictures. What is kept there, or
in RLX_HOME, is not run again: the same command goes on where it was stopped. `--page` only writes
the page.
"""

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_registry import Registry, RunRecord

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "make"))
from rlx_command import ROOT, rlx

if TYPE_CHECKING:
    from study_page import Group

STUDY = Path("experiments/study")
SUITE = str(STUDY / "suites" / "study.yaml")
KEPT = ROOT / STUDY / "results"
AT_ONCE = max(1, (os.cpu_count() or 1))
UNTRACKED = (
    "--set=tracking.mlflow=null",
    "--set=tracking.pictures=false",
    "--set=tracking.rollouts=none",
)
"""Kept out of the runs of a study of a hundred, none of which decides what is learned."""
METRICS = (
    "train/advantage_abs_",
    "train/span_entropy",
    "rewards/accuracy/mean",
    "rewards/arithmetic/mean",
    "rewards/brier/mean",
    "rewards/exact_match/mean",
    "calibration/",
    "environment/",
    "eval/held_out/",
    "probe/",
)
"""What the names of curves that are kept begin with; the others stay where the run was made."""
CHANGES = {"run", "moved", "grouped", "evaluation", "metrics"}
"""What is kept of a run's journal."""
COLUMNS = ("phase", "step", "steps_total")
"""What is kept of its row, which also says where it was made."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Runs of one group that differ in their seeds alone.

    Attributes:
        label: what the page calls it.
        spec: the experiment's file, from the repository's root.
        sets: `path=value`, as `--set` takes them.
        seeds: as `--seeds` takes them.
        suite: what the trained models are asked besides the experiment's own questions.
    """

    label: str
    spec: str
    sets: tuple[str, ...] = ()
    seeds: str = "0..4"
    suite: str | None = None


def _arm(label: str, name: str) -> Recipe:
    return Recipe(label, f"{STUDY}/{name}.yaml", suite=SUITE)


def _shape(answers: int, confidences: int) -> Recipe:
    each = ("num_generations_answer", answers), ("num_generations_confidence", confidences)
    sets = tuple(f"rollout.{key}={n}" for key, n in each)
    return Recipe(f"{answers} × {confidences}", f"{STUDY}/center.yaml", sets)


def _asked(label: str, name: str, *sets: str) -> Recipe:
    return Recipe(label, f"{STUDY}/{name}.yaml", sets, "0..2")


PPO = (
    "estimator={name: gae, gamma: 1.0, lam: 1.0, whiten: true}",
    "critic={learning_rate: 1e-3, lead_steps: 3}",
)
BY_TURN = "credit.placement=turn_proportional"
KL_REWARD = ("credit.use_kl_in_reward=true", "credit.kl_coef=0.01")
SUMS_EVERYWHERE = (
    "rewards.turn.sums={plugin: countdown.arithmetic, turn: answer, of: format, weight: 0.15}"
)
FORM = "rewards.turn.form={plugin: rlcr.format, pattern: bc, turn: confidence, weight: 0.25}"
ANSWERS_CENTRED = ("estimator.normalize=center", "estimator.lambda_ans=1.3")
TWICE_AS_LONG = ("phases.1.steps=240", "evaluation.every=40")
NO_ENTROPY = "loss.entropy=null"
KL_LOSS = "loss.kl={coefficient: 0.01}"

GROUPS: dict[str, tuple[Recipe, ...]] = {
    "study-arms": (
        _arm("centred", "center"),
        _arm("σ", "sigma"),
        _arm("prompt scale", "prompt_scale"),
        _arm("EMA scale", "ema_scale"),
        _arm("coupled", "coupled"),
        _arm("accuracy only", "accuracy"),
    ),
    "study-shapes": (_shape(4, 4), _shape(2, 10), _shape(3, 6), _shape(6, 2)),
    "study-open": (
        _asked("centred", "center"),
        _asked("twice as long", "center", *TWICE_AS_LONG),
        _asked("confidence's form rewarded", "center", FORM),
        _asked("numbers to 20", "center", "task.number_range=[1, 20]"),
        _asked("sums rewarded in wrong answers too", "center", SUMS_EVERYWHERE),
        _asked(
            "sums and form rewarded, answers centred",
            "center",
            *ANSWERS_CENTRED,
            SUMS_EVERYWHERE,
            FORM,
        ),
        _asked("confidences all random", "center", "task.demonstrations.informed=0"),
        Recipe("no entropy bonus", "experiments/rlcr.yaml", seeds="0..2"),
    ),
    "study-recipe": (
        _arm("centred", "center"),
        Recipe("no entropy bonus", "experiments/rlcr.yaml", suite=SUITE),
        Recipe("coupled, no entropy bonus", f"{STUDY}/coupled.yaml", (NO_ENTROPY,)),
    ),
    "study-push": (
        _asked("σ", "sigma"),
        _asked("σ, half the push", "sigma", "estimator.lambda_conf=0.825"),
        _asked("σ, no entropy bonus", "sigma", NO_ENTROPY),
        _asked("coupled", "coupled"),
        _asked("coupled, no entropy bonus", "coupled", NO_ENTROPY),
    ),
    "study-kg": (
        _asked("multi-turn GRPO", "kg"),
        _asked("multi-turn GRPO, KL", "kg", KL_LOSS),
        _asked("GRPO", "kg", "estimator={name: grpo}"),
        _asked("PPO, last token", "kg", *PPO),
        _asked("PPO, by turn", "kg", *PPO, BY_TURN),
        _asked("PPO, by turn, averaged", "kg", *PPO, BY_TURN, "credit.turn_reduce=mean"),
        _asked("PPO, last token, KL", "kg", *PPO, *KL_REWARD),
    ),
    "study-probe": (
        _asked("GRPO", "probe"),
        _asked("GRPO, KL", "probe", KL_LOSS),
        _asked("PPO", "probe", *PPO),
        _asked("PPO, KL", "probe", *PPO, *KL_REWARD),
    ),
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
    with registry() as open_registry:
        there = {name: came_of(name, open_registry) for name in GROUPS}
        write(
            {name: group for name, group in there.items() if group},
            [name for name, group in there.items() if not group],
        )


def registry() -> Registry:
    """The registry of RLX_HOME, to read."""
    from rlx.home import tracking_url

    return Registry.open(tracking_url("sqlite:///{home}/registry.db"), read_only=True)


def train(group: str, recipe: Recipe) -> None:
    """Runs the seeds of a recipe that have not finished."""
    sets = [part for each in recipe.sets for part in ("--set", each)]
    seeds = ("--seeds", recipe.seeds, "--group", group, "--at-once", str(AT_ONCE))
    rlx("submit", recipe.spec, *seeds, *sets, *UNTRACKED)


def came_of(group: str, open_registry: Registry) -> "Group | None":
    """What there is of a group; None where none of its first recipe has finished."""
    from study_page import Group

    runs: dict[str, dict[int, str]] = {}
    for run in open_registry.runs(group=group):
        if run.status == "finished":
            runs.setdefault(run.digest, {}).setdefault(run.seed, run.id)
    found = [(each.label, runs.get(digest(each), {})) for each in GROUPS[group]]
    if not found[0][1]:
        return None
    there = [(label, own) for label, own in found if own]
    return Group(open_registry, tuple(x for x, _ in there), tuple(own for _, own in there))


def digest(recipe: Recipe) -> str:
    """Of a recipe's experiment, whatever the seed."""
    from rlx.discovery import check_file

    read, _ = check_file(ROOT / recipe.spec, recipe.sets)
    return read.spec.digest


def finished(group: str, recipe: Recipe) -> list[RunRecord]:
    """A recipe's runs that have finished."""
    own = digest(recipe)
    with registry() as open_registry:
        runs = open_registry.runs(group=group)
    return [run for run in runs if (run.status, run.digest) == ("finished", own)]


def evaluate(group: str) -> None:
    """Asks every run of a group what its suite asks that it has not been asked."""
    wanted = [
        ("eval", run.id, "--suite", recipe.suite)
        for recipe in GROUPS[group]
        if recipe.suite
        for run in finished(group, recipe)
        if not is_evaluated(run, Path(recipe.suite))
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda arguments: rlx(*arguments, quiet=True), wanted):
            pass


def is_evaluated(run: RunRecord, suite: Path) -> bool:
    """Whether a run has answered every set of a suite."""
    from rlx.spec.reading import read_suite

    asked = read_suite(ROOT / suite)
    with registry() as open_registry:
        known = {e.suite for e in open_registry.results.evaluations(run.id)}
    return {f"suite/{asked.name}/{name}" for name in asked.sets} <= known


def keep(group: str) -> None:
    """Writes what came of a group's runs in a small form; a run of two groups is kept once."""
    KEPT.mkdir(exist_ok=True)
    for run in (run for recipe in GROUPS[group] for run in finished(group, recipe)):
        journal = Path(run.directory or "") / "journal.jsonl"
        if run.directory is None or not journal.exists():
            sys.exit(f"{run.id} has no journal: what came of it cannot be kept")
        lines = "".join(_small(journal)).encode()
        kept_as(run).write_bytes(gzip.compress(lines, mtime=0))


def kept_as(run: RunRecord) -> Path:
    """Where what came of a run is kept."""
    return KEPT / f"{run.digest}-{run.seed}.jsonl.gz"


def _small(journal: Path) -> Iterator[str]:
    """Lines of a journal that tables and pictures are made of."""
    with journal.open(encoding="utf-8") as lines:
        for line in lines:
            said = json.loads(line)
            own = said["with"]
            if said["change"] == "metrics":
                kept = {n: v for n, v in own["values"].items() if n.startswith(METRICS)}
                said["with"] = own = {**own, "values": kept} if kept else {}
            elif said["change"] == "set":
                said["with"] = own = {key: own[key] for key in COLUMNS if key in own}
            elif said["change"] not in CHANGES:
                continue
            if own:
                yield json.dumps(said, separators=(",", ":")) + "\n"


def bring_back() -> None:
    """Makes runs that are kept and that RLX_HOME does not know known to its registry."""
    from rlx.home import get_rlx_home

    texts = {file: gzip.decompress(file.read_bytes()) for file in KEPT.glob("*.jsonl.gz")}
    by_time = sorted(
        texts, key=lambda file: float(json.loads(texts[file].split(b"\n", 1)[0])["at"])
    )
    folders = [get_rlx_home() / "kept" / file.name.removesuffix(".jsonl.gz") for file in by_time]
    for file, folder in zip(by_time, folders, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        journal = folder / "journal.jsonl"
        if not journal.exists():  # it may say more than what is kept by now
            journal.write_bytes(texts[file])
    if folders:
        rlx("db", "import", *map(str, folders), quiet=True)


if __name__ == "__main__":
    main()
