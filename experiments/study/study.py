"""`make study`: runs the study of calibration in a small model; see experiments/study/README.md.

    python experiments/study/study.py [--page] [--rescore] [--only GROUP ...]

Trains the missing runs of every group, evaluates every run, stores compact results in
experiments/study/results, and writes study.md with its pictures. Runs that are stored there or in
RLX_HOME are not repeated, so an interrupted command continues where it stopped. Every run of
RLX_HOME with recorded rollouts is then rescored under the present rewards. `--page` only writes the
page, `--rescore` only rescores and writes it.
"""

import argparse
import gzip
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_registry import Registry, RunRecord

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "make"))
from rlx_command import ROOT, rlx
from study_rescore import rescore_runs

if TYPE_CHECKING:
    from study_page import Group

STUDY = Path("experiments/study")
SUITE = str(STUDY / "suites" / "study.yaml")
KEPT = ROOT / STUDY / "results"
AT_ONCE = max(1, (os.cpu_count() or 1))
UNTRACKED = ("--set=tracking.mlflow=null",)
"""Tracking that a study of a hundred runs does not need; it does not affect training. Rollouts are
recorded, 10 MB for a run, so that the runs can be rescored."""
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
"""Prefixes of the metrics stored in the results."""
OWN = ("digest", "seed", "name", "spec", "yaml", "plugins", "code", "environment")
"""Fields of a run that are stored in the results."""
EVALUATION = ("step", "label", "suite", "n", "metrics", "payload")
"""Fields of an evaluation."""
COLUMNS = ("phase", "step", "steps_total")
"""Columns of a "set" line; others describe the machine."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Runs of one group that differ only in their seeds.

    Attributes:
        label: the name on the page.
        spec: the experiment file, relative to the repository root.
        sets: values for `--set`, as `path=value`.
        seeds: value for `--seeds`.
        suite: evaluation suite, in addition to the experiment's own evaluation.
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


def _build_open_recipe(label: str, name: str, *sets: str) -> Recipe:
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
        _build_open_recipe("centred", "center"),
        _build_open_recipe("twice as long", "center", *TWICE_AS_LONG),
        _build_open_recipe("confidence's form rewarded", "center", FORM),
        _build_open_recipe("numbers to 20", "center", "task.number_range=[1, 20]"),
        _build_open_recipe("sums rewarded in wrong answers too", "center", SUMS_EVERYWHERE),
        _build_open_recipe(
            "sums and form rewarded, answers centred",
            "center",
            *ANSWERS_CENTRED,
            SUMS_EVERYWHERE,
            FORM,
        ),
        _build_open_recipe("confidences all random", "center", "task.demonstrations.informed=0"),
        Recipe("no entropy bonus", "experiments/rlcr.yaml", seeds="0..2"),
    ),
    "study-recipe": (
        _arm("centred", "center"),
        Recipe("no entropy bonus", "experiments/rlcr.yaml", suite=SUITE),
        _arm("coupled", "coupled"),
    ),
    "study-push": (
        _build_open_recipe("σ", "sigma"),
        _build_open_recipe("σ, half the push", "sigma", "estimator.lambda_conf=0.825"),
        _build_open_recipe("σ, no entropy bonus", "sigma", NO_ENTROPY),
    ),
    "study-kg": (
        _build_open_recipe("multi-turn GRPO", "kg"),
        _build_open_recipe("multi-turn GRPO, KL", "kg", KL_LOSS),
        _build_open_recipe("GRPO", "kg", "estimator={name: grpo}"),
        _build_open_recipe("PPO, last token", "kg", *PPO),
        _build_open_recipe("PPO, by turn", "kg", *PPO, BY_TURN),
        _build_open_recipe(
            "PPO, by turn, averaged", "kg", *PPO, BY_TURN, "credit.turn_reduce=mean"
        ),
        _build_open_recipe("PPO, last token, KL", "kg", *PPO, *KL_REWARD),
    ),
    "study-probe": (
        _build_open_recipe("GRPO", "probe"),
        _build_open_recipe("GRPO, KL", "probe", KL_LOSS),
        _build_open_recipe("PPO", "probe", *PPO),
        _build_open_recipe("PPO, KL", "probe", *PPO, *KL_REWARD),
    ),
}
"""The recipes of every question, the reference recipe first."""


def main() -> None:
    """Runs the missing experiments and writes the page."""
    from study_page import write

    parser = argparse.ArgumentParser(description="the study: runs, evaluations, and the page")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    parser.add_argument("--rescore", action="store_true", help="only rescore, and write the page")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    options = parser.parse_args()
    bring_back()
    for group in () if options.page or options.rescore else options.only:
        for recipe in GROUPS[group]:
            train(group, recipe)
        evaluate(group)
        keep(group)
    with registry() as open_registry:
        if not options.page:
            labels = {d: r.label for g in GROUPS.values() for r in g for d in list_digests(r)}
            rescore_runs(open_registry, labels)
        there = {name: came_of(name, open_registry) for name in GROUPS}
        write(
            {name: group for name, group in there.items() if group},
            [name for name, group in there.items() if not group],
        )


def registry() -> Registry:
    """Opens the registry of RLX_HOME for reading."""
    from rlx.home import tracking_url

    return Registry.open(tracking_url("sqlite:///{home}/registry.db"), read_only=True)


def train(group: str, recipe: Recipe) -> None:
    """Runs the unfinished seeds of a recipe."""
    there = {run.seed for run in finished(group, recipe)}
    missing = [seed for seed in list_seeds(recipe) if seed not in there]
    if not missing:
        return
    sets = [part for each in recipe.sets for part in ("--set", each)]
    seeds = ("--seeds", ",".join(map(str, missing)), "--group", group, "--at-once", str(AT_ONCE))
    rlx("submit", recipe.spec, *seeds, *sets, *UNTRACKED)


def came_of(group: str, open_registry: Registry) -> "Group | None":
    """The results of a group; None if no run of its first recipe has finished."""
    from study_page import Group

    runs: dict[str, dict[int, str]] = {}
    for run in open_registry.runs(group=group):
        if run.status == "finished":
            runs.setdefault(run.digest, {}).setdefault(run.seed, run.id)
    found = [
        (each.label, {seed: at for d in list_digests(each) for seed, at in runs.get(d, {}).items()})
        for each in GROUPS[group]
    ]
    if not found[0][1]:
        return None
    there = [(label, own) for label, own in found if own]
    return Group(open_registry, tuple(x for x, _ in there), tuple(own for _, own in there))


def list_digests(recipe: Recipe) -> tuple[str, str]:
    """The digests of a recipe's runs, which do not depend on the seed.

    In the first one, that of most stored runs, an option counts that is written with its default.
    """
    from rlx.plan import check_file

    read, plugins = check_file(ROOT / recipe.spec, recipe.sets)
    return read.spec.digest, plugins.compute_digest(read.spec)


def list_seeds(recipe: Recipe) -> range:
    """The seeds of a recipe."""
    first, last = map(int, recipe.seeds.split(".."))
    return range(first, last + 1)


def finished(group: str, recipe: Recipe) -> list[RunRecord]:
    """The finished runs of a recipe."""
    own = list_digests(recipe)
    with registry() as open_registry:
        runs = open_registry.runs(group=group)
    return [run for run in runs if run.status == "finished" and run.digest in own]


def evaluate(group: str) -> None:
    """Evaluates the runs of a group on their suites, unless already done."""
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
    """Whether a run has been evaluated on every set of a suite."""
    from rlx.spec.reading import read_suite

    suite_spec = read_suite(ROOT / suite)
    with registry() as open_registry:
        known = {e.suite for e in open_registry.results.evaluations(run.id)}
    return {f"suite/{suite_spec.name}/{name}" for name in suite_spec.sets} <= known


def keep(group: str) -> None:
    """Stores the compact results of a group's runs; a run of two groups is stored once."""
    KEPT.mkdir(exist_ok=True)
    runs = [run for recipe in GROUPS[group] for run in finished(group, recipe)]
    with registry() as open_registry:
        for run in runs:
            lines = (json.dumps(e, separators=(",", ":")) for e in describe(open_registry, run))
            kept_as(run).write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", mtime=0))


def kept_as(run: RunRecord) -> Path:
    """The result file of a run."""
    return KEPT / f"{run.digest}-{run.seed}.jsonl.gz"


def describe(known: Registry, run: RunRecord) -> Iterator[dict[str, Any]]:
    """What tables and pictures need of a run, a line each."""
    yield {"change": "run", "at": run.created, "with": {name: getattr(run, name) for name in OWN}}
    for name in known.queries.groups([run.id])[run.id]:
        yield {"change": "grouped", "with": {"name": name}}
    steps: dict[int, dict[str, float]] = {}
    for name, points in known.results.metrics(run.id).items():
        for step, value in points if name.startswith(METRICS) else ():
            steps.setdefault(step, {})[name] = value
    for step, values in sorted(steps.items()):
        yield {"change": "metrics", "with": {"step": step, "values": values}}
    for found in known.results.evaluations(run.id):
        own = {name: getattr(found, name) for name in EVALUATION}
        yield {"change": "evaluation", "with": own}
    yield {"change": "set", "with": {"step": run.step, "steps_total": run.steps_total}}


def bring_back() -> None:
    """Adds stored runs to the registry of RLX_HOME unless it already has them."""
    from rlx.home import get_rlx_home

    stored = [
        [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
        for file in KEPT.glob("*.jsonl.gz")
    ]
    home = get_rlx_home()
    home.mkdir(parents=True, exist_ok=True)
    with Registry.open(f"sqlite:///{home}/registry.db") as known:
        there = {(run.digest, run.seed) for run in known.runs() if run.status == "finished"}
        for entries in sorted(stored, key=lambda entries: float(entries[0]["at"])):
            own = entries[0]["with"]
            if (own["digest"], own["seed"]) not in there:
                with known.write_atomically():
                    restore(known, entries)


def restore(known: Registry, entries: Sequence[Mapping[str, Any]]) -> None:
    """Records a run from the lines that are stored of it."""
    own = {name: entries[0]["with"][name] for name in OWN}
    run, _ = known.submit(**own, again=True)
    known.start(run.id, ["submitted"])
    for entry in entries:
        told = entry["with"]
        match entry["change"]:
            case "grouped":
                known.join(run.id, told["name"])
            case "metrics":
                known.results.add_metrics(run.id, told["step"], told["values"], entry.get("at"))
            case "evaluation":
                known.results.add_evaluation(run.id, *(told[name] for name in EVALUATION))
            case "set":
                known.update_run(run.id, **{name: told[name] for name in COLUMNS if name in told})
    known.transition(run.id, ["running"], "finished")


if __name__ == "__main__":
    main()
