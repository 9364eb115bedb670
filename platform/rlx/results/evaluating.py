"""Evaluates a trained model on a suite of held-out sets, or probes how much its answers depend on
their reasoning, and records the results with its run.

Answered batches are kept in a folder, so that an interrupted evaluation goes on where it stopped.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlx.agents import build_rollout_host, compute_command_digests
from rlx.discovery import resolve_plugins
from rlx.errors import EnvironmentFault, RewardError, SpecError, summarize_error
from rlx.evaluation import (
    ScoredAnswer,
    build_pairs,
    compute_answer_metrics,
    draw_suite,
    read_answers,
)
from rlx.home import get_rlx_home
from rlx.launch import locate_run_folder, open_registry
from rlx.model import compute_model_fingerprint
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.probe import (
    ProbeResult,
    RecordedProbe,
    compute_agreement,
    compute_settings_digest,
    draw_probe_curves,
    draw_verbal_against_sampled,
    settings_of,
)
from rlx.progress import Report, ShowProgress, ignore_progress, log_report
from rlx.record import Recorder, probe_table, update_trackers
from rlx.results.models import LoadedModel, TrainedModel, load_model, open_target
from rlx.results.targets import OpenedRun, check_sections, locate_target
from rlx.reward import score_rollouts
from rlx.rollout import sample_rollout_trees
from rlx.run import (
    build_probe_context,
    build_probe_records,
    build_prompt_fit,
    draw_held_out_problems,
    draw_probes,
    probe_problems,
)
from rlx.spec import OWN_SUITE, ExperimentSpec, ProbeSpec, SetSpec, SuiteSpec
from rlx.spec.reading import InvalidSpec, apply_overrides, label_refusal, read_suite
from rlx.text import escape_unprintable, explain_write_errors
from rlx_registry import RunRecord, sync_to_disk, write_body

OWN = "held_out"
"""Name of the experiment's own held-out set in the default suite."""
BATCH = 64
"""Problems that are answered, scored and kept together. Every problem has its own seeds, so that
changes no answer."""
EVALUATION_SECTIONS = ("runner", "sampler")
"""Spec sections that may be overridden; a suite's sets change the rest."""


@dataclass(frozen=True, slots=True)
class SuiteEvaluation:
    """An evaluated suite.

    Attributes:
        target: the model; the files of a checkpoint no longer exist.
        suite: the suite, with what the caller changed.
        answers, figures: the scored answers and the metrics of each set, by name.
        recorded: folder of the plots that were added to the run's records; None if nothing was.
    """

    target: TrainedModel
    suite: SuiteSpec
    answers: Mapping[str, Sequence[ScoredAnswer]]
    figures: Mapping[str, dict[str, Any]]
    recorded: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """What `rlx eval --json` prints."""
        target = self.target
        return {
            "run": target.run.id if target.run else None,
            "step": target.step,
            "model": target.model if target.step is None else None,
            "suite": self.suite.model_dump(mode="json"),
            "sets": dict(self.figures),
        }

    def list_answers(self) -> Iterator[dict[str, Any]]:
        for name, own in self.answers.items():
            for answer in own:
                yield {"set": name, **answer.to_json()}

    def draw_pictures(self, folder: Path) -> list[Path]:
        """Draws reliability diagrams and risk-coverage curves as files of a folder."""
        outside = frozenset(n for n, s in self.suite.sets.items() if s.distribution == "out")
        with explain_write_errors(folder):
            return draw_suite(self.answers, self.figures, outside, folder)


def evaluate(
    target: str | OpenedRun,
    *,
    experiment: Path | None = None,
    step: int | None = None,
    suite: Path | None = None,
    problems: int | None = None,
    samples: int | None = None,
    greedy: bool = False,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    registry: str | None = None,
    record: bool = True,
    show: ShowProgress = ignore_progress,
    report: Report = log_report,
) -> SuiteEvaluation:
    """Answers and scores a suite. Answers are kept, so an interrupted evaluation goes on.

    Args:
        target: a run, or the folder or hub name of a model.
        experiment: file of a model's experiment; None for a run, which has its own.
        step: evaluate the run's checkpoint of this step; None evaluates its exported model.
        suite: YAML file with held-out sets; None takes the experiment's own.
        problems: problems per set; None takes the suite's number, as of `samples` and `seed`.
        samples: answers per problem.
        greedy: use greedy decoding.
        seed: of problems and sampling.
        overrides: `key=value` of the sections `runner` and `sampler`.
        record: add the results and their plots to the records of the run that trained the model.
        show: called with the progress, in problems.

    Raises:
        SpecError: the request does not fit the model, or there is no such run or checkpoint.
        InvalidSpec: the suite or an override is invalid.
        EnvironmentFault: the model's files, the device or room on the disk are missing.
        RewardError: no answer of a set could be scored.
    """
    for asked, count in (("problems", problems), ("samples", samples)):
        if count is not None and count < 1:
            raise SpecError(f"{asked} is {count}: it must be at least 1")
    if step is not None and experiment is not None:
        raise SpecError("--at is for a run, which has its own experiment: drop --spec")
    ref, url = locate_target(target, registry)
    reason = (
        f"a model is evaluated as it was trained; only {', '.join(EVALUATION_SECTIONS)} may be "
        "changed here, anything else in a suite's sets"
    )
    departures = {"problems": problems, "samples": samples, "greedy": greedy or None, "seed": seed}
    with open_target(ref, experiment, url, step=step) as trained:
        check_sections(overrides, EVALUATION_SECTIONS, reason)
        spec = trained.read_spec(overrides)
        whole = build_requested_suite(spec, suite, departures, report)
        sets = {
            name: build_set_spec(trained, name, one, overrides) for name, one in whole.sets.items()
        }
        answers = _answer_suite(trained, spec, whole, sets, show)
    figures = {}
    for name, found in answers.items():
        if not found:
            raise RewardError(f"no answer of set {name!r} could be scored: all were dropped")
        figures[name] = compute_answer_metrics(found, seed=whole.seed)
        figures[name]["distribution"] = whole.sets[name].distribution
    evaluated = SuiteEvaluation(trained, whole, answers, figures)
    if record and trained.run is not None:
        return replace(evaluated, recorded=_record_evaluation(evaluated, trained.run, url, report))
    return evaluated


def _record_evaluation(found: SuiteEvaluation, run: RunRecord, url: str, report: Report) -> Path:
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
        update_trackers(registry, run, report)
    return folder


@label_refusal("evaluated")
def build_requested_suite(
    spec: ExperimentSpec, file: Path | None, changed: Mapping[str, Any], report: Report
) -> SuiteSpec:
    """The suite of the file, or the experiment's own, with the values of `changed` that are not
    None. These become part of its name (`problems-5`, `greedy`), so that its records never replace
    those of the full suite."""
    if file is None:
        sets = {OWN: SetSpec(distribution="in")}
        for name, options in spec.evaluation.variants.items():
            sets[name] = SetSpec(set={f"task.{key}": value for key, value in options.items()})
        problems = spec.evaluation.problems
        whole = SuiteSpec(name=OWN_SUITE, problems=problems, seed=spec.seed, sets=sets)
    elif (whole := read_suite(file)).name == OWN_SUITE:
        raise SpecError(
            f"{escape_unprintable(str(file))}: the suite of the experiment's own sets is called "
            f"{OWN_SUITE!r}; choose another name"
        )
    suite = whole.model_copy(update={k: v for k, v in changed.items() if v is not None})
    if changed.get("problems") is not None:
        every = {n: s.model_copy(update={"problems": None}) for n, s in suite.sets.items()}
        suite = suite.model_copy(update={"sets": every})
    if suite.greedy and suite.samples > 1:
        warning = f"{suite.samples} greedy answers would be identical: taking one"
        report(f"warning: {warning}", err=True)
        suite = suite.model_copy(update={"samples": 1})
    counts = [{s.problems or one.problems for s in one.sets.values()} for one in (whole, suite)]
    departures = []
    for name in changed:
        value = getattr(suite, name)
        same = counts[0] == counts[1] if name == "problems" else value == getattr(whole, name)
        if not same:
            departures.append(name if value is True else f"{name}-{value}")
    return suite.model_copy(update={"name": ".".join([whole.name, *departures])})


def build_set_spec(
    target: TrainedModel, name: str, one: SetSpec, overrides: Sequence[str]
) -> ExperimentSpec:
    """The experiment with the changes of a set, without the warm start, whose demonstrations the
    set's task may lack."""
    changes = [f"{path}={json.dumps(value)}" for path, value in one.set.items()]
    model = target.document.tree.get("model")
    if isinstance(model, dict) and model.get("warm_start") is not None:
        changes.append("model.warm_start=null")
    try:
        return target.read_spec((*overrides, *changes))
    except InvalidSpec as error:
        raise SpecError(f"set {escape_unprintable(name)!r} of the suite: {error}") from error


def _answer_suite(
    target: TrainedModel,
    spec: ExperimentSpec,
    suite: SuiteSpec,
    sets: Mapping[str, ExperimentSpec],
    show: ShowProgress,
) -> dict[str, list[ScoredAnswer]]:
    counts = {name: suite.sets[name].problems or suite.problems for name in sets}
    answers: dict[str, list[ScoredAnswer]] = {}
    before, total = 0, sum(counts.values())
    folder = locate_run_folder(target.run).root if target.run else get_rlx_home() / "cache"
    with load_model(spec, target.model) as model:
        mark = target.mark or compute_model_fingerprint(model.source)
        for name, own in sets.items():
            try:
                setup = build_setup(own)
                kept = folder / "evaluations" / _compute_answers_digest(setup, suite, mark)
                answers[name] = []
                for first in range(0, counts[name], BATCH):
                    show(before + first, total, name)
                    numbers = range(first, min(first + BATCH, counts[name]))
                    answers[name] += _answer_batch(setup, suite, numbers, model, kept)
            except SpecError as error:
                raise SpecError(f"set {name!r} of the suite: {error}") from error
            before += counts[name]
            show(before, total, name)
    return answers


def _answer_batch(
    setup: PhaseSetup, suite: SuiteSpec, numbers: range, model: LoadedModel, folder: Path
) -> list[ScoredAnswer]:
    # With more problems, the answers of a last batch that was smaller are sampled anew.
    path = folder / f"{numbers.start:06d}_{len(numbers):03d}.json"
    with suppress(OSError, ValueError, TypeError, LookupError):
        return [ScoredAnswer.from_json(record) for record in json.loads(path.read_bytes())]
    fit = build_prompt_fit(model.policy, setup)
    try:
        drawn, seeds = draw_held_out_problems(fit, setup.task, suite.seed, numbers, "evaluation")
    except ValueError as error:  # no problem matches the task's options
        raise SpecError(str(error)) from error
    except OSError as error:
        raise EnvironmentFault(f"the task's data: {summarize_error(error)}") from error
    sampling = {"top_k": 1} if suite.greedy else {}
    plan = setup.plan.copy_with_sampling(suite.samples, **sampling)
    dialogue = model.policy.dialogue
    host = build_rollout_host(setup, model.pool, model.policy)
    with model.sampler.session() as session:
        trees = sample_rollout_trees(plan, drawn.problems, seeds, session, dialogue, host)
    table = score_rollouts(trees, setup.rewards, model.pool)
    batch = [
        replace(answer, problem=drawn.numbers[answer.problem])
        for answer in read_answers(plan, trees, table, setup.spec.evaluation.correct)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps([answer.to_json() for answer in batch]))
    sync_to_disk(aside)
    aside.replace(path)
    return batch


def _compute_answers_digest(setup: PhaseSetup, suite: SuiteSpec, mark: str) -> str:
    """Digest of everything that determines an answer, and of what is kept of it."""
    spec, plugins = setup.spec.dump_resolved(), resolve_plugins(setup.spec)
    sections = ("task", "rollout", "rewards", "sampler", "evaluation")
    settings = {name: spec[name] for name in sections}
    sampling = {"seed": suite.seed, "samples": suite.samples, "greedy": suite.greedy}
    sources = [plugin.sha256 for plugin in plugins.provenance]
    data = [record["data"] for record in plugins.list_records()]
    if setup.plan.agent is not None:
        data += compute_command_digests(setup.plan.agent)
    kept = [field.name for field in fields(ScoredAnswer)]
    text = json.dumps([settings, sampling, mark, sources, data, kept], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


PROBE_SECTIONS = ("probe", "runner", "sampler", "seed")
"""Spec sections that may be overridden; the others define what was trained."""


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """A probed model: every answer with its continuations, a record per scheme, and the suites that
    were added to the run's records."""

    target: TrainedModel
    result: ProbeResult
    probes: tuple[RecordedProbe, ...]
    recorded: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What `rlx eval --probe --json` prints."""
        found = [compute_agreement(one.verbal) for one in self.probes]
        stated = next((asdict(one) for one in found if one is not None), None)
        return {
            "run": self.target.run.id if self.target.run else None,
            "model": self.target.model,
            "step": self.probes[0].step if self.target.run else None,
            "recorded": list(self.recorded),
            "probes": {one.suite: dict(one.figures) for one in self.probes},
            "verbal_conf_against_mc_p_correct": stated,
        }

    def write_samples(self, path: Path) -> None:
        with explain_write_errors(path):
            write_body(path, probe_table(self.result))

    def draw_pictures(self, path: Path) -> None:
        """Draws the probe curves, and stated against sampled confidence where it was stated, as
        `.png` and `.svg`."""
        with explain_write_errors(path):
            draw_probe_curves(self.probes, path)
            if any(one.verbal for one in self.probes):
                stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
                draw_verbal_against_sampled(self.probes, stem.with_name(f"{stem.name}-verbal_conf"))


def probe_model(
    target: str | OpenedRun,
    *,
    experiment: Path | None = None,
    problems: int | None = None,
    samples: int | None = None,
    schemes: Sequence[str] = (),
    seed: int | None = None,
    overrides: Sequence[str] = (),
    registry: str | None = None,
    record: bool = True,
    show: ShowProgress = ignore_progress,
    report: Report = log_report,
) -> ModelProbe:
    """Cuts or alters a model's reasoning and samples its answers, by default as the experiment's
    `probe:` section says.

    Args:
        target: a run, or the folder or hub name of a model.
        experiment: file of a model's experiment; None for a run, which has its own.
        problems: number of held-out problems.
        samples: continuations per cut point.
        schemes: how to alter the reasoning.
        seed: of problems and sampling.
        overrides: `key=value`; of a run only of the sections `probe`, `runner`, `sampler`, `seed`.
        record: add the probes that the run lacks to its records.
        show: called with the progress, in problems.

    Raises:
        SpecError, InvalidSpec: the request does not fit the model, or no answer could be probed.
        EnvironmentFault: the model's files or the device are missing.
    """
    ref, url = locate_target(target, registry)
    settings_of_call = {
        "probe.problems": problems,
        "probe.samples": samples,
        "probe.schemes": list(schemes) or None,
        "seed": seed,
    }
    named = [f"{key}={json.dumps(v)}" for key, v in settings_of_call.items() if v is not None]
    changes = (*overrides, *named)
    if experiment is None:
        reason = (
            f"a run is probed as it was trained; only {', '.join(PROBE_SECTIONS)} may be changed"
        )
        check_sections(changes, PROBE_SECTIONS, reason)
    with open_target(ref, experiment, url) as trained:
        document = trained.document
        if not document.tree.get("probe"):
            document = apply_overrides(document, ["probe={}"])
        spec = replace(trained, document=document).read_spec(changes)
        settings, setup = spec.probe or ProbeSpec(), build_setup(spec)
        with load_model(spec, trained.model) as model:
            context = build_probe_context(setup, model.policy, model.sampler, model.pool)
            fit = build_prompt_fit(model.policy, setup)
            result = probe_problems(
                settings, context, fit, spec.seed, None, lambda at: show(at.done, at.total)
            )
    step = trained.run.step if trained.run else 0
    probes = build_probe_records(result, settings, spec.seed, step)
    if not probes:
        bare = sum(a.reasoning is None for a in result.answered)
        raise SpecError(
            f"none of {len(result.answered)} answers could be probed: {bare} have no span "
            f"{settings.span!r}"
        )
    if trained.run is not None:
        probes = _name_probe_suites(probes, trained.run)
    found = ModelProbe(trained, result, tuple(probes))
    if record and trained.run is not None:
        recorded = _record_new_probes(found, trained.run, url, report)
        return replace(found, recorded=tuple(recorded))
    return found


def _record_new_probes(found: ModelProbe, run: RunRecord, url: str, report: Report) -> list[str]:
    """Adds the probes that a run lacks to its records; returns their suites."""
    probes = found.probes
    folder, step = locate_run_folder(run), probes[0].step
    with open_registry(url, read_only=False) as registry:
        there = {e.suite for e in registry.results.evaluations(run.id, "probe/") if e.step == step}
        new = [one for one in probes if f"probe/{one.suite}" not in there]
        if old := [one.suite for one in probes if one not in new]:
            report(f"{run.id} has this already: {', '.join(old)}", err=True)
        if not new:
            return []
        # A separate file, so that the samples of earlier probes are kept.
        marks = compute_settings_digest({one.suite: one.figures["settings"] for one in probes})
        path = folder.probe(step)
        path = path.with_name(f"{path.stem}_{marks}{path.suffix}")
        recorder = Recorder(registry, run.id, keep_bodies=True)
        recorder.probe(new, found.result, "after", path)
        draw_probes(registry, run.id, folder)
        update_trackers(registry, run, report)
    return [one.suite for one in new]


def _name_probe_suites(probes: Sequence[RecordedProbe], run: RunRecord) -> list[RecordedProbe]:
    """Names the suites of probes whose settings differ from the run's own after the settings."""
    spec = ExperimentSpec.from_record(run.spec)
    own, named = spec.probe or ProbeSpec(), []
    for one in probes:
        settings = one.figures["settings"]
        usual = settings == settings_of(own, settings["scheme"], spec.seed)
        digest = "" if usual else f"/{compute_settings_digest(settings)}"
        named.append(replace(one, suite=f"{one.suite}{digest}"))
    return named
