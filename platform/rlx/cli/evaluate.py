"""`rlx eval`: what a trained model can do and whether it knows, near and far from training."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.registry import folder_of, open_registry, registry_option
from rlx.cli.target import Target, folder_target, run_target, tell_mlflow
from rlx.discovery import check
from rlx.errors import EnvironmentFault, RewardError, SpecError
from rlx.run.launch import child_environment
from rlx.run.paths import home, shown
from rlx.run.progress import Progress
from rlx.spec import ExperimentSpec
from rlx.spec.diagnostic import InvalidSpec, printable
from rlx.spec.reader import apply_overrides, validate
from rlx.spec.suite import SetSpec, SuiteSpec, read_suite

if TYPE_CHECKING:
    from rlx.evaluation.answers import Answer
    from rlx_registry import RunRecord

__all__ = ["evaluate"]

OWN = "held_out"
"""Name of the experiment's own held-out set in the suite that is taken where none is named."""
FREE = ("runner", "sampler")
"""Sections that may be other than the run's own; a suite's sets change the rest."""

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)

Figures = dict[str, dict[str, Any]]


@click.command("eval")
@click.argument("target", metavar="RUN|PATH")
@click.option(
    "--spec", "file", type=_FILE, metavar="FILE", help="The experiment of a model's PATH."
)
@click.option("--suite", "suite_file", type=_FILE, metavar="FILE", help="Sets, in YAML.")
@click.option("--problems", type=_COUNT, help="Of every set.")
@click.option("--samples", type=_COUNT, help="Answers to every problem.")
@click.option("--greedy", is_flag=True, help="Take the most likely tokens.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Of problems and sampling.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change runner or sampler."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--pictures", type=_FILE, metavar="FOLDER", help="Draw it there.")
@click.option("--out", type=_FILE, metavar="FILE", help="Write every answer as JSON Lines.")
@click.option("--record/--no-record", default=True, help="Add it to the RUN's records.")
@registry_option
def evaluate(
    target: str,
    file: Path | None,
    suite_file: Path | None,
    problems: int | None,
    samples: int | None,
    greedy: bool,
    seed: int | None,
    overrides: tuple[str, ...],
    as_json: bool,
    pictures: Path | None,
    out: Path | None,
    record: bool,
    url: str,
) -> None:
    """Answer held-out problems with a trained model: accuracy and calibration, with intervals.

    Evaluates the model that RUN has exported, or the one in folder PATH with the experiment --spec.
    Without a --suite the sets are the experiment's own: its task, and `evaluation.variants`. What
    has been answered is kept: the same command goes on where it was stopped.
    """
    found = run_target(target, url) if file is None else folder_target(target, file)
    spec = _spec(found, overrides)
    suite = _own_suite(spec) if suite_file is None else read_suite(suite_file)
    asked = {"problems": problems, "samples": samples, "seed": seed, "greedy": greedy or None}
    suite = suite.model_copy(update={k: v for k, v in asked.items() if v is not None})
    if problems is not None:
        every = {n: s.model_copy(update={"problems": None}) for n, s in suite.sets.items()}
        suite = suite.model_copy(update={"sets": every})
    sets = {name: _of_set(found, name, one, overrides) for name, one in suite.sets.items()}
    answers = _answered(found, spec, sets, suite)
    figures = _figures(answers, suite)
    outside = frozenset(n for n, s in suite.sets.items() if s.distribution == "out")
    if out is not None:
        _write(answers, out)
    if pictures is not None:
        _draw(answers, figures, outside, pictures)
    if record and found.run is not None:
        _record(found.run, suite, answers, figures, outside, url)
    if as_json:
        told = {
            "run": found.run.id if found.run else None,
            "model": str(found.model),
            "suite": suite.model_dump(mode="json"),
            "sets": figures,
        }
        click.echo(json.dumps(told, indent=2, allow_nan=False))
    else:
        from rlx.cli.evaluated import show_suite

        show_suite(suite, figures)
        sys.stdout.flush()


# What is asked ---------------------------------------------------------------------------------


def _spec(target: Target, overrides: Sequence[str]) -> ExperimentSpec:
    fixed = sorted({o for o in overrides if o.partition("=")[0].split(".")[0] not in FREE})
    if fixed:
        raise SpecError(
            f"--set {printable(fixed[0])}: a model is evaluated as it was trained; only "
            f"{', '.join(FREE)} may be changed here, and all else in a suite's sets"
        )
    return _checked(target, overrides)


def _checked(target: Target, overrides: Sequence[str]) -> ExperimentSpec:
    document = apply_overrides(target.document, overrides)
    read = validate(document, Path(document.file))
    check(read)
    return read.spec


def _own_suite(spec: ExperimentSpec) -> SuiteSpec:
    """The held-out sets of the experiment itself."""
    sets = {OWN: SetSpec(distribution="in")}
    for name, options in spec.evaluation.variants.items():
        sets[name] = SetSpec(set={f"task.{key}": value for key, value in options.items()})
    return SuiteSpec(name="own", problems=spec.evaluation.problems, seed=spec.seed, sets=sets)


def _of_set(target: Target, name: str, one: SetSpec, overrides: Sequence[str]) -> ExperimentSpec:
    """The experiment as it stands for a set.

    Raises:
        InvalidSpec: what the set changes does not fit.
    """
    changes = [f"{path}={json.dumps(value)}" for path, value in one.set.items()]
    try:
        return _checked(target, (*overrides, *changes))
    except InvalidSpec as error:
        raise SpecError(f"set {printable(name)!r} of the suite: {error}") from error


# Answering -------------------------------------------------------------------------------------


def _answered(
    target: Target, spec: ExperimentSpec, sets: Mapping[str, ExperimentSpec], suite: SuiteSpec
) -> "dict[str, list[Answer]]":
    os.environ.update(child_environment())  # before anything imports transformers
    from rlx.run.evaluating import answer_suite

    kept = folder_of(target.run).root if target.run else home() / "cache"
    with _bar() as show:
        return answer_suite(spec, sets, suite, target.model, kept / "evaluations", show)


@contextmanager
def _bar() -> "Iterator[Any]":
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True, highlight=False)
    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("problems"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bars:
        task = bars.add_task("starting", total=None)

        def show(progress: Progress) -> None:
            bars.update(
                task,
                description=printable(progress.stage),
                completed=progress.done,
                total=progress.total,
            )

        yield show


def _figures(answers: "Mapping[str, Sequence[Answer]]", suite: SuiteSpec) -> Figures:
    from rlx.evaluation.answers import figures

    if empty := [name for name, own in answers.items() if not own]:
        raise RewardError(f"no answer of set {empty[0]!r} could be scored: all were dropped")
    return {
        name: {**figures(own, seed=suite.seed), "distribution": suite.sets[name].distribution}
        for name, own in answers.items()
    }


# What becomes of it ----------------------------------------------------------------------------


def _write(answers: "Mapping[str, Sequence[Answer]]", path: Path) -> None:
    lines = (
        json.dumps({"set": name, **answer.to_json()}) + "\n"
        for name, own in answers.items()
        for answer in own
    )
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _draw(
    answers: "Mapping[str, Sequence[Answer]]",
    figures: Figures,
    outside: frozenset[str],
    folder: Path,
) -> list[Path]:
    from rlx.evaluation.suite_pictures import draw_suite

    try:
        return draw_suite(answers, figures, outside, folder)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(path: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(f"cannot write {printable(str(path))}: {error.strerror or error}")


def _record(
    run: "RunRecord",
    suite: SuiteSpec,
    answers: "Mapping[str, Sequence[Answer]]",
    figures: Figures,
    outside: frozenset[str],
    url: str,
) -> None:
    """Adds the sets to the run's evaluations after its last step, and the pictures to its files."""
    from rlx.record.recorder import Recorder

    folder = folder_of(run).pictures / f"suite-{suite.name}"
    made = _draw(answers, figures, outside, folder)
    with open_registry(url, read_only=False) as registry:
        recorder = Recorder(registry, run.id, keep_bodies=True)
        for name, found in figures.items():
            own = answers[name]
            stated = [a.to_json()["confidences"] for a in own]
            pairs = {
                "problem_ids": [a.problem_id for a in own],
                "strata": [a.stratum for a in own],
                "correct": [a.correct for a in own],
                "confidence": [c[0] for c in stated] if all(stated) else None,
                "suite": suite.model_dump(mode="json"),
            }
            recorder.evaluation(run.step, "after", found, pairs, f"suite/{suite.name}/{name}")
        for path in made:
            registry.add_artifact(run.id, path, "picture")
        tell_mlflow(registry, run)
    click.echo(f"recorded for {run.id} after step {run.step}; {shown(folder)}/", err=True)
