"""Evaluates a trained model on a suite of held-out sets, and records the results with its run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.assess.target import TrainedModel, check_sections, open_target
from rlx.checks import check_read_spec, validate_document
from rlx.errors import RewardError, SpecError
from rlx.home import get_rlx_home
from rlx.launch import (
    get_registry_url,
    locate_run_folder,
    open_registry,
    send_run_folder,
)
from rlx.record import update_trackers
from rlx.reporting import Report, ShowProgress, ignore_progress, log_report
from rlx.spec import OWN_SUITE, ExperimentSpec, SetSpec, SuiteSpec
from rlx.spec.reading import InvalidSpec, apply_overrides, label_refusal, read_suite
from rlx.text import escape_unprintable
from rlx.writing import explain_write_errors
from rlx_registry import RunRecord

if TYPE_CHECKING:
    from rlx.evaluation import ScoredAnswer  # brings torch

__all__ = [
    "EvaluationRequest",
    "SuiteEvaluation",
    "build_requested_suite",
    "build_set_spec",
    "evaluate",
]

OWN = "held_out"
"""Name of the experiment's own held-out set in the default suite."""
DEPARTURES = ("problems", "samples", "greedy", "seed")
"""Suite settings that a request can change."""
FREE = ("runner", "sampler")
"""Spec sections that may be overridden; a suite's sets change the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to evaluate, and on which problems.

    Attributes:
        target: a run, or the folder or hub name of a model.
        experiment: file of a model's experiment; None for a run, which has its own.
        step: evaluate the run's checkpoint of this step; None evaluates its exported model.
        suite: YAML file with held-out sets; None takes the experiment's own.
        problems: problems per set; None takes the suite's number, as all that follow.
        samples: answers per problem.
        greedy: use greedy decoding.
        seed: seed of problems and sampling.
        overrides: `key=value` of the sections `runner` and `sampler`.
    """

    target: str
    experiment: Path | None = None
    step: int | None = None
    suite: Path | None = None
    problems: int | None = None
    samples: int | None = None
    greedy: bool = False
    seed: int | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.step is not None and self.experiment is not None:
            raise SpecError("--at is for a run, which has its own experiment: drop --spec")


@dataclass(frozen=True, slots=True)
class SuiteEvaluation:
    """An evaluated suite.

    Attributes:
        target: the model; the files of a checkpoint no longer exist.
        suite: the suite, with what the request changed.
        answers: the scored answers of each set, by name.
        figures: metrics of each set, by name.
        recorded: folder of the plots that were added to the run's records; None if nothing was.
    """

    target: TrainedModel
    suite: SuiteSpec
    answers: "Mapping[str, Sequence[ScoredAnswer]]"
    figures: Mapping[str, dict[str, Any]]
    recorded: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain JSON values, as `rlx eval --json` prints them."""
        target = self.target
        return {
            "run": target.run.id if target.run else None,
            "step": target.step,
            "model": target.model if target.step is None else None,
            "suite": self.suite.model_dump(mode="json"),
            "sets": dict(self.figures),
        }

    def list_answers(self) -> Iterator[dict[str, Any]]:
        """Yields every answer as plain JSON values, with the name of its set."""
        for name, own in self.answers.items():
            for answer in own:
                yield {"set": name, **answer.to_json()}

    def draw_pictures(self, folder: Path) -> list[Path]:
        """Draws reliability diagrams and risk-coverage curves as files of a folder.

        Raises:
            EnvironmentFault: the folder cannot be written.
        """
        from rlx.evaluation import draw_suite

        outside = frozenset(n for n, s in self.suite.sets.items() if s.distribution == "out")
        with explain_write_errors(folder):
            return draw_suite(self.answers, self.figures, outside, folder)


def evaluate(
    request: EvaluationRequest | str,
    *,
    registry: str | None = None,
    record: bool = True,
    show: ShowProgress = ignore_progress,
    report: Report = log_report,
) -> SuiteEvaluation:
    """Answers and scores a suite; answers are cached, so an interrupted evaluation resumes.

    Args:
        request: the model, and on which problems; a run stands for its exported model on its
            experiment's own sets.
        registry: URL of the registry of runs; None takes that of the command line.
        record: add the results and their plots to the records of the run that trained the model.
        show: called with the progress, in problems.
        report: called with warnings.

    Raises:
        SpecError: the request does not fit the model, or there is no such run or checkpoint.
        InvalidSpec: the suite or an override is invalid.
        EnvironmentFault: the model's files or the device are missing, or the run's folder cannot be
            written.
        RewardError: no answer of a set could be scored.
    """
    if isinstance(request, str):
        request = EvaluationRequest(target=request)
    url = get_registry_url(registry)
    with open_target(request.target, request.experiment, url, step=request.step) as target:
        spec = _build_target_spec(target, request.overrides)
        suite = build_requested_suite(spec, request, report)
        sets = {
            name: build_set_spec(target, name, one, request.overrides)
            for name, one in suite.sets.items()
        }
        from rlx.audit import answer_suite  # a request that is refused needs no torch

        root = get_rlx_home() / "cache"
        if target.run:
            root = locate_run_folder(target.run, "evaluations").root
        answers = answer_suite(
            *(spec, sets, suite, target.model, target.mark, root / "evaluations"),
            lambda at: show(at.done, at.total, at.stage),
        )
    from rlx.evaluation import compute_answer_metrics

    if empty := [name for name, own in answers.items() if not own]:
        raise RewardError(f"no answer of set {empty[0]!r} could be scored: all were dropped")
    figures = {
        name: {
            **compute_answer_metrics(own, seed=suite.seed),
            "distribution": suite.sets[name].distribution,
        }
        for name, own in answers.items()
    }
    found = SuiteEvaluation(target, suite, answers, figures)
    if record and target.run is not None:
        return replace(found, recorded=_record_evaluation(found, target.run, url, report))
    return found


def _record_evaluation(found: SuiteEvaluation, run: RunRecord, url: str, report: Report) -> Path:
    """Adds an evaluation and its plots to the records of its run; returns the plots' folder."""
    from rlx.audit import draw_over_steps
    from rlx.record import Recorder

    step, suite = found.target.step, found.suite
    ending = "" if step is None else f"-step-{step}"
    folder = locate_run_folder(run, "pictures").pictures / f"suite-{suite.name}{ending}"
    made = found.draw_pictures(folder)
    with open_registry(url, read_only=False) as registry:
        recorder = Recorder(registry, run.id, keep_bodies=True)
        for name, figures in found.figures.items():
            own = found.answers[name]
            stated = [a.to_json()["confidences"] for a in own]
            pairs = {
                "problem_ids": [a.problem_id for a in own],
                "strata": [a.stratum for a in own],
                "correct": [a.correct for a in own],
                "confidence": [c[0] for c in stated] if all(stated) else None,
                "suite": suite.model_dump(mode="json"),
            }
            at, label = (run.step, "after") if step is None else (step, "step")
            recorder.evaluation(at, label, figures, pairs, f"suite/{suite.name}/{name}")
        for path in made:
            registry.results.add_artifact(run.id, path, "picture")
        draw_over_steps(registry, run.id, locate_run_folder(run))
        send_run_folder(run)
        update_trackers(registry, run, report)
    return folder


# The suite --------------------------------------------------------------------------------------


def _build_target_spec(target: TrainedModel, overrides: Sequence[str]) -> ExperimentSpec:
    reason = (
        f"a model is evaluated as it was trained; only {', '.join(FREE)} may be changed here, "
        "anything else in a suite's sets"
    )
    check_sections(overrides, FREE, reason)
    return _apply_target_overrides(target, overrides)


@label_refusal("evaluated")
def _apply_target_overrides(target: TrainedModel, overrides: Sequence[str]) -> ExperimentSpec:
    document = apply_overrides(target.document, overrides)
    read = validate_document(document, Path(document.file))
    check_read_spec(read)
    return read.spec


@label_refusal("evaluated")
def build_requested_suite(
    spec: ExperimentSpec, request: EvaluationRequest, report: Report
) -> SuiteSpec:
    """Returns the suite of the file, or the experiment's own, with what the request changes.

    What is changed becomes part of the suite's name, so that its records never replace those of
    the full suite.
    """
    file, changed = request.suite, {name: getattr(request, name) for name in DEPARTURES}
    changed["greedy"] = request.greedy or None
    whole = _own_suite(spec) if file is None else read_suite(file)
    if file is not None and whole.name == OWN_SUITE:
        raise SpecError(
            f"{escape_unprintable(str(file))}: the suite of the experiment's own sets is called "
            f"{OWN_SUITE!r}; choose another name"
        )
    suite = whole.model_copy(update={k: v for k, v in changed.items() if v is not None})
    if request.problems is not None:
        every = {n: s.model_copy(update={"problems": None}) for n, s in suite.sets.items()}
        suite = suite.model_copy(update={"sets": every})
    if suite.greedy and suite.samples > 1:
        warning = f"{suite.samples} greedy answers would be identical: taking one"
        report(f"warning: {warning}", err=True)
        suite = suite.model_copy(update={"samples": 1})
    return suite.model_copy(
        update={"name": ".".join([whole.name, *_list_suite_departures(whole, suite)])}
    )


def _list_suite_departures(whole: SuiteSpec, suite: SuiteSpec) -> Iterator[str]:
    """Yields the settings in which a suite differs from the full one: `problems-5`, `greedy`.

    They contain only characters that MLflow and file names allow.
    """
    problems = [{s.problems or one.problems for s in one.sets.values()} for one in (whole, suite)]
    for name in DEPARTURES:
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
