"""Evaluates a trained model on a suite of held-out sets, and records the results with its run.

Finished batches of answers are cached in a folder, so an interrupted evaluation resumes where it
stopped. Every problem has its own seeds, so the split into sessions does not change any answer.
"""

import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlx.agents import build_rollout_host
from rlx.discovery import resolve_plugins
from rlx.errors import EnvironmentFault, RewardError, SpecError, summarize_error
from rlx.evaluation import (
    ScoredAnswer,
    build_pairs,
    compute_answer_metrics,
    draw_suite,
    read_answers,
)
from rlx.home import format_path, get_rlx_home
from rlx.launch import (
    get_registry_url,
    locate_run_folder,
    open_registry,
)
from rlx.model import compute_model_fingerprint
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.plugin_calls import show_plugin_output
from rlx.progress_callbacks import Report, ShowProgress, ignore_progress, log_report
from rlx.record import Recorder, update_trackers
from rlx.results.models import LoadedModel, TrainedModel, load_model, open_target
from rlx.results.requests import EvaluationRequest, check_sections
from rlx.reward import score_rollouts
from rlx.rollout import sample_rollout_trees
from rlx.run import build_prompt_fit, draw_over_steps
from rlx.seeding import derive_seed
from rlx.spec import OWN_SUITE, ExperimentSpec, SetSpec, SuiteSpec
from rlx.spec.reading import InvalidSpec, label_refusal, read_suite
from rlx.text import escape_unprintable, explain_write_errors
from rlx_registry import RunRecord

OWN = "held_out"
"""Name of the experiment's own held-out set in the default suite."""
DEPARTURES = ("problems", "samples", "greedy", "seed")
"""Suite settings that a request can change."""
FREE = ("runner", "sampler")
"""Spec sections that may be overridden; a suite's sets change the rest."""


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
    answers: Mapping[str, Sequence[ScoredAnswer]]
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
    reason = (
        f"a model is evaluated as it was trained; only {', '.join(FREE)} may be changed here, "
        "anything else in a suite's sets"
    )
    with open_target(request.target, request.experiment, url, step=request.step) as target:
        check_sections(request.overrides, FREE, reason)
        spec = _read_target_spec(target, request.overrides)
        suite = build_requested_suite(spec, request, report)
        sets = {
            name: build_set_spec(target, name, one, request.overrides)
            for name, one in suite.sets.items()
        }
        folder = get_rlx_home() / "cache"
        if target.run:
            folder = locate_run_folder(target.run).root
        answers = _answer_suite(target, spec, suite, sets, folder / "evaluations", show)
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
    step, suite = found.target.step, found.suite
    ending = "" if step is None else f"-step-{step}"
    folder = locate_run_folder(run).pictures / f"suite-{suite.name}{ending}"
    made = found.draw_pictures(folder)
    with open_registry(url, read_only=False) as registry:
        recorder = Recorder(registry, run.id, keep_bodies=True)
        for name, figures in found.figures.items():
            own = found.answers[name]
            pairs = {**build_pairs(own), "suite": suite.model_dump(mode="json")}
            at, label = (run.step, "after") if step is None else (step, "step")
            recorder.evaluation(at, label, figures, pairs, f"suite/{suite.name}/{name}")
        for path in made:
            registry.results.add_artifact(run.id, path, "picture")
        draw_over_steps(registry, run.id, locate_run_folder(run))
        update_trackers(registry, run, report)
    return folder


# The suite --------------------------------------------------------------------------------------


@label_refusal("evaluated")
def _read_target_spec(target: TrainedModel, overrides: Sequence[str]) -> ExperimentSpec:
    return target.read_spec(overrides)


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
        return _read_target_spec(target, (*overrides, *changes))
    except InvalidSpec as error:
        raise SpecError(f"set {escape_unprintable(name)!r} of the suite: {error}") from error


BATCH = 64
"""Problems that are answered, scored and cached together."""


def _answer_suite(
    target: TrainedModel,
    spec: ExperimentSpec,
    suite: SuiteSpec,
    sets: Mapping[str, ExperimentSpec],
    kept: Path,
    show: ShowProgress,
) -> dict[str, list[ScoredAnswer]]:
    """Answers every set of a suite, reusing cached answers sampled with the same settings.

    Args:
        target: the model.
        spec: provides runner and sampler; of its model section only the chat template is used.
        suite: how many problems and answers.
        sets: the experiment spec of each set, by name.
        kept: cache folder of finished batches.
        show: called with the progress, in problems.
    """
    counts = {name: suite.sets[name].problems or suite.problems for name in sets}
    answers: dict[str, list[ScoredAnswer]] = {}
    before, total = 0, sum(counts.values())
    with load_model(spec, target.model) as model:
        mark = target.mark or compute_model_fingerprint(model.source)
        for name, own in sets.items():
            try:
                setup = build_setup(own)
                folder = kept / _compute_answers_digest(setup, suite, mark)
                answers[name] = []
                for first in range(0, counts[name], BATCH):
                    show(before + first, total, name)
                    numbers = range(first, min(first + BATCH, counts[name]))
                    answers[name] += _answer_batch(setup, suite, numbers, model, folder)
            except SpecError as error:
                raise SpecError(f"set {name!r} of the suite: {error}") from error
            before += counts[name]
            show(before, total, name)
    return answers


def _answer_batch(
    setup: PhaseSetup, suite: SuiteSpec, numbers: range, model: LoadedModel, folder: Path
) -> list[ScoredAnswer]:
    """Answers some problems of a set, or reads their cached answers."""
    # The file name includes the batch size: raising the problem count resamples a partial batch.
    path = folder / f"{numbers.start:06d}_{len(numbers):03d}.json.gz"
    if (kept := _load_answer_batch(path)) is not None:
        return kept
    data = derive_seed(suite.seed, "held out")
    try:
        with show_plugin_output(setup.spec.task.plugin):
            drawn = build_prompt_fit(model.policy, setup).draw_held_out(
                lambda n: setup.task.problem("test", n, data), numbers
            )
    except ValueError as error:  # no problem matches the task's options
        raise SpecError(str(error)) from error
    except OSError as error:
        raise EnvironmentFault(f"the task's data: {summarize_error(error)}") from error
    sampling = {"top_k": 1} if suite.greedy else {}
    plan = setup.plan.copy_with_sampling(suite.samples, **sampling)
    seeds = [derive_seed(suite.seed, "evaluation", n) for n in drawn.numbers]
    dialogue = model.policy.dialogue
    host = build_rollout_host(setup, model.pool, model.policy)
    with model.sampler.session() as session:
        trees = sample_rollout_trees(plan, drawn.problems, seeds, session, dialogue, host)
    table = score_rollouts(trees, setup.rewards, model.pool)
    batch = [
        replace(answer, problem=drawn.numbers[answer.problem])
        for answer in read_answers(plan, trees, table, setup.spec.evaluation.correct)
    ]
    _save_answer_batch(path, json.dumps([answer.to_json() for answer in batch]))
    return batch


def _compute_answers_digest(setup: PhaseSetup, suite: SuiteSpec, mark: str) -> str:
    """Digest of everything that determines an answer: the model, the set's spec, the plugins' code
    and data, and the sampling settings; and of what is stored of it."""
    spec, plugins = setup.spec.dump_resolved(), resolve_plugins(setup.spec)
    sections = ("task", "rollout", "rewards", "sampler", "evaluation")
    settings = {name: spec[name] for name in sections}
    sampling = {"seed": suite.seed, "samples": suite.samples, "greedy": suite.greedy}
    sources = [plugin.sha256 for plugin in plugins.provenance]
    data = [record["data"] for record in plugins.list_records()]
    stored = [field.name for field in fields(ScoredAnswer)]
    text = json.dumps([settings, sampling, mark, sources, data, stored], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load_answer_batch(path: Path) -> list[ScoredAnswer] | None:
    """Reads a cached batch; None if it is missing or unreadable."""
    try:
        kept = json.loads(gzip.decompress(path.read_bytes()))
        return [ScoredAnswer.from_json(record) for record in kept]
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError) as error:
        reason = f"{format_path(path)} cannot be read ({error})"
        warning = f"warning: {reason}: its problems are answered again"
        print(escape_unprintable(warning), file=sys.stderr, flush=True)
        return None


def _save_answer_batch(path: Path, text: str) -> None:
    """Writes a batch atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(gzip.compress(text.encode(), mtime=0))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
