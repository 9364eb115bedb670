"""`rlx eval`: accuracy and calibration of a trained model, in and out of distribution."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx.checks import check_read_spec, validate_document
from rlx.cli.output import format_json, print_text
from rlx.cli.progress_bar import open_progress_bar
from rlx.cli.registry import locate_run_folder, open_registry, registry_option
from rlx.cli.trained_model import (
    TrainedModel,
    checkpoint_target,
    model_target,
    run_target,
    update_mlflow_mirror,
)
from rlx.cli.writing import explain_write_errors
from rlx.errors import RewardError, SpecError
from rlx.home import format_path, get_rlx_home
from rlx.launch import child_environment
from rlx.spec import OWN_SUITE, ExperimentSpec, SetSpec, SuiteSpec
from rlx.spec.reading import InvalidSpec, apply_overrides, label_refusal, read_suite
from rlx.text import escape_unprintable

if TYPE_CHECKING:
    from rlx.evaluation import ScoredAnswer
    from rlx_registry import RunRecord

__all__ = ["build_set_spec", "evaluate"]

OWN = "held_out"
"""Name of the experiment's own held-out set in the default suite."""
ASKED = ("problems", "samples", "greedy", "seed")
"""Suite settings that options can override."""
FREE = ("runner", "sampler")
"""Spec sections that may be overridden; a suite's sets change the rest."""

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)

Figures = dict[str, dict[str, Any]]


@click.command("eval")
@click.argument("target", metavar="RUN|MODEL")
@click.option(
    "--at", type=click.IntRange(0), metavar="STEP", help="Evaluate RUN at this checkpoint."
)
@click.option("--spec", "file", type=_FILE, metavar="FILE", help="Experiment file of a MODEL.")
@click.option(
    "--suite", "suite_file", type=_FILE, metavar="FILE", help="YAML file with held-out sets."
)
@click.option("--problems", type=_COUNT, help="Problems per set.")
@click.option("--samples", type=_COUNT, help="Answers per problem.")
@click.option("--greedy", is_flag=True, help="Use greedy decoding.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Seed of problems and sampling.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a runner or sampler value.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--pictures", type=_FILE, metavar="FOLDER", help="Write plots to this folder.")
@click.option("--out", type=_FILE, metavar="FILE", help="Write every answer as JSON Lines.")
@click.option("--record/--no-record", default=True, help="Add the results to RUN's records.")
@registry_option
def evaluate(
    target: str,
    at: int | None,
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
    """Evaluate a trained model on held-out problems: accuracy and calibration, with intervals.

    Evaluates the exported model of RUN, or one of its checkpoints; or a MODEL, given by its folder
    or hub name, with the experiment of --spec. Without --suite, the sets are the experiment's own:
    its task and `evaluation.variants`. Answers are cached: repeat an interrupted command to
    continue where it stopped.
    """
    settings = {"problems": problems, "samples": samples, "seed": seed, "greedy": greedy or None}
    _require_places(out, pictures)
    with _open_evaluation_target(target, at, file, url) as found:
        suite, answers = _answer_requested_suite(found, suite_file, settings, overrides)
    figures = _compute_suite_figures(answers, suite)
    outside = frozenset(n for n, s in suite.sets.items() if s.distribution == "out")
    if out is not None:
        _write_answers(answers, out)
    if pictures is not None:
        _draw_suite_pictures(answers, figures, outside, pictures)
    if record and found.run is not None:
        _record_suite(found.run, found.step, suite, answers, figures, outside, url)
    if as_json:
        report = {
            "run": found.run.id if found.run else None,
            "step": found.step,
            "model": found.model if found.step is None else None,
            "suite": suite.model_dump(mode="json"),
            "sets": figures,
        }
        print_text(format_json(report, indent=2, allow_nan=False))
    else:
        from rlx.cli.suite_tables import show_suite

        show_suite(suite, figures)
        sys.stdout.flush()


# Target and suite ------------------------------------------------------------------------------


@contextmanager
def _open_evaluation_target(
    name: str, at: int | None, file: Path | None, url: str
) -> Iterator[TrainedModel]:
    """Yields the model to evaluate; the files of a checkpoint exist until the block ends."""
    os.environ.update(child_environment())  # before transformers is imported
    if at is None:
        yield run_target(name, url) if file is None else model_target(name, file)
        return
    if file is not None:
        raise SpecError("--at is for a run, which has its own experiment: drop --spec")
    with checkpoint_target(name, at, url) as found:
        yield found


def _build_target_spec(target: TrainedModel, overrides: Sequence[str]) -> ExperimentSpec:
    fixed = sorted({o for o in overrides if o.partition("=")[0].split(".")[0] not in FREE})
    if fixed:
        raise SpecError(
            f"--set {escape_unprintable(fixed[0])}: a model is evaluated as it was trained; only "
            f"{', '.join(FREE)} may be changed here, anything else in a suite's sets"
        )
    return _apply_target_overrides(target, overrides)


@label_refusal("evaluated")
def _apply_target_overrides(target: TrainedModel, overrides: Sequence[str]) -> ExperimentSpec:
    document = apply_overrides(target.document, overrides)
    read = validate_document(document, Path(document.file))
    check_read_spec(read)
    return read.spec


@label_refusal("evaluated")
def _build_requested_suite(
    spec: ExperimentSpec, file: Path | None, settings: Mapping[str, Any]
) -> SuiteSpec:
    """Returns the suite of the file, or the experiment's own, with overridden settings.

    Overridden settings become part of the suite's name, so that its records never replace those of
    the full suite.
    """
    whole = _own_suite(spec) if file is None else read_suite(file)
    if file is not None and whole.name == OWN_SUITE:
        raise SpecError(
            f"{escape_unprintable(str(file))}: the suite of the experiment's own sets is called "
            f"{OWN_SUITE!r}; choose another name"
        )
    suite = whole.model_copy(update={k: v for k, v in settings.items() if v is not None})
    if settings["problems"] is not None:
        every = {n: s.model_copy(update={"problems": None}) for n, s in suite.sets.items()}
        suite = suite.model_copy(update={"sets": every})
    if suite.greedy and suite.samples > 1:
        warning = f"{suite.samples} greedy answers would be identical: taking one"
        print_text(f"warning: {warning}", err=True)
        suite = suite.model_copy(update={"samples": 1})
    return suite.model_copy(
        update={"name": ".".join([whole.name, *_list_suite_departures(whole, suite)])}
    )


def _list_suite_departures(whole: SuiteSpec, suite: SuiteSpec) -> Iterator[str]:
    """Yields the settings in which a suite differs from the full one: `problems-5`, `greedy`.

    They contain only characters that MLflow and file names allow.
    """
    problems = [{s.problems or one.problems for s in one.sets.values()} for one in (whole, suite)]
    for name in ASKED:
        value = getattr(suite, name)
        same = problems[0] == problems[1] if name == "problems" else value == getattr(whole, name)
        if not same:
            yield name if value is True else f"{name}-{value}"


def _own_suite(spec: ExperimentSpec) -> SuiteSpec:
    """Returns a suite of the experiment's own held-out sets."""
    sets = {OWN: SetSpec(distribution="in")}
    for name, options in spec.evaluation.variants.items():
        sets[name] = SetSpec(set={f"task.{key}": value for key, value in options.items()})
    return SuiteSpec(name=OWN_SUITE, problems=spec.evaluation.problems, seed=spec.seed, sets=sets)


def build_set_spec(
    target: TrainedModel, name: str, one: SetSpec, overrides: Sequence[str]
) -> ExperimentSpec:
    """Returns the experiment with the changes of a set.

    The warm start is removed, since the set's task may lack the demonstrations that it needs.

    Raises:
        SpecError: the changes of the set do not fit the experiment.
    """
    changes = [f"{path}={json.dumps(value)}" for path, value in one.set.items()]
    model = target.document.tree.get("model")
    if isinstance(model, dict) and model.get("warm_start") is not None:
        changes.append("model.warm_start=null")
    try:
        return _apply_target_overrides(target, (*overrides, *changes))
    except InvalidSpec as error:
        raise SpecError(f"set {escape_unprintable(name)!r} of the suite: {error}") from error


# Answering -------------------------------------------------------------------------------------


def _answer_requested_suite(
    target: TrainedModel, file: Path | None, settings: Mapping[str, Any], overrides: Sequence[str]
) -> "tuple[SuiteSpec, dict[str, list[ScoredAnswer]]]":
    """Returns the requested suite and the answers to its problems."""
    spec = _build_target_spec(target, overrides)
    suite = _build_requested_suite(spec, file, settings)
    sets = {name: build_set_spec(target, name, one, overrides) for name, one in suite.sets.items()}
    from rlx.audit import answer_suite

    kept = (
        locate_run_folder(target.run).root if target.run else get_rlx_home() / "cache"
    ) / "evaluations"
    with open_progress_bar("starting", "problems") as show:
        return suite, answer_suite(
            *(spec, sets, suite, target.model, target.mark, kept),
            lambda at: show(at.done, at.total, at.stage),
        )


def _compute_suite_figures(
    answers: "Mapping[str, Sequence[ScoredAnswer]]", suite: SuiteSpec
) -> Figures:
    from rlx.evaluation import compute_answer_metrics

    if empty := [name for name, own in answers.items() if not own]:
        raise RewardError(f"no answer of set {empty[0]!r} could be scored: all were dropped")
    return {
        name: {
            **compute_answer_metrics(own, seed=suite.seed),
            "distribution": suite.sets[name].distribution,
        }
        for name, own in answers.items()
    }


# Results ---------------------------------------------------------------------------------------


def _write_answers(answers: "Mapping[str, Sequence[ScoredAnswer]]", path: Path) -> None:
    lines = (
        json.dumps({"set": name, **answer.to_json()}) + "\n"
        for name, own in answers.items()
        for answer in own
    )
    with explain_write_errors(path):
        path.write_text("".join(lines), encoding="utf-8")


def _draw_suite_pictures(
    answers: "Mapping[str, Sequence[ScoredAnswer]]",
    figures: Figures,
    outside: frozenset[str],
    folder: Path,
) -> list[Path]:
    from rlx.evaluation import draw_suite

    with explain_write_errors(folder):
        return draw_suite(answers, figures, outside, folder)


def _require_places(out: Path | None, pictures: Path | None) -> None:
    """Checks, before any answer is sampled, that the output paths are writable."""
    if out is not None and not (out.is_fifo() or out.is_char_device()):
        new = not out.exists()
        with explain_write_errors(out):
            out.open("ab").close()
        if new:
            out.resolve().unlink()
    if pictures is not None:
        with explain_write_errors(pictures):
            pictures.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=pictures).close()


def _record_suite(
    run: "RunRecord",
    step: int | None,
    suite: SuiteSpec,
    answers: "Mapping[str, Sequence[ScoredAnswer]]",
    figures: Figures,
    outside: frozenset[str],
    url: str,
) -> None:
    """Adds the evaluations of a step (the last one by default) and their plots to the run."""
    from rlx.audit import draw_over_steps
    from rlx.record import Recorder

    at, label = (run.step, "after") if step is None else (step, "step")
    ending = "" if step is None else f"-step-{step}"
    folder = locate_run_folder(run).pictures / f"suite-{suite.name}{ending}"
    made = _draw_suite_pictures(answers, figures, outside, folder)
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
            recorder.evaluation(at, label, found, pairs, f"suite/{suite.name}/{name}")
        for path in made:
            registry.results.add_artifact(run.id, path, "picture")
        draw_over_steps(registry, run.id, locate_run_folder(run))
        update_mlflow_mirror(registry, run)
    print_text(f"recorded for {run.id} after step {at}; {format_path(folder)}/", err=True)
