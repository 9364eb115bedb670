"""Probes a trained model: how much its answers depend on its reasoning; records it with its run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlx.errors import SpecError
from rlx.launch import (
    get_registry_url,
    locate_run_folder,
    open_registry,
)
from rlx.phase_setup import build_setup
from rlx.probe import (
    ProbeResult,
    RecordedProbe,
    compute_agreement,
    compute_settings_digest,
    draw_probe_curves,
    draw_verbal_against_sampled,
    settings_of,
)
from rlx.progress_callbacks import Report, ShowProgress, ignore_progress, log_report
from rlx.record import Recorder, probe_table, update_trackers
from rlx.results.models import TrainedModel, load_model, open_target
from rlx.results.requests import ProbeRequest, check_sections
from rlx.run import (
    build_probe_context,
    build_probe_records,
    draw_probes,
    probe_problems,
    record_probe_results,
)
from rlx.spec import ExperimentSpec, ProbeSpec
from rlx.spec.reading import apply_overrides
from rlx.text import explain_write_errors
from rlx_registry import RunRecord, write_body

FREE = ("probe", "runner", "sampler", "seed")
"""Spec sections that may be overridden; the others define what was trained."""


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """A probed model.

    Attributes:
        target: the model.
        result: every answer with its continuations.
        probes: one per scheme.
        recorded: suites that were added to the run's records.
    """

    target: TrainedModel
    result: ProbeResult
    probes: tuple[RecordedProbe, ...]
    recorded: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain JSON values, as `rlx eval --probe --json` prints them."""
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
        """Writes every sample as Parquet.

        Raises:
            EnvironmentFault: the file cannot be written.
        """
        with explain_write_errors(path):
            write_body(path, probe_table(self.result))

    def draw_pictures(self, path: Path) -> None:
        """Draws the probe curves, and stated against sampled confidence where it was stated.

        Args:
            path: of a `.png`; an `.svg` is written beside it.

        Raises:
            EnvironmentFault: the file cannot be written.
        """
        with explain_write_errors(path):
            draw_probe_curves(self.probes, path)
            if any(one.verbal for one in self.probes):
                stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
                draw_verbal_against_sampled(self.probes, stem.with_name(f"{stem.name}-verbal_conf"))


def probe_model(
    request: ProbeRequest | str,
    *,
    registry: str | None = None,
    record: bool = True,
    again: bool = False,
    show: ShowProgress = ignore_progress,
    report: Report = log_report,
) -> ModelProbe:
    """Cuts or alters a model's reasoning and samples its answers.

    Args:
        request: the model, and how it is probed; a run stands for its exported model, probed as its
            experiment says.
        registry: URL of the registry of runs; None takes that of the command line.
        record: add the probes that the run lacks to its records.
        again: record them even if the run has them.
        show: called with the progress, in problems.
        report: called with what the run has already.

    Raises:
        SpecError: the request does not fit the model, or no answer could be probed.
        InvalidSpec: an override is invalid.
        EnvironmentFault: the model's files or the device are missing.
    """
    if isinstance(request, str):
        request = ProbeRequest(target=request)
    changes, url = request.list_overrides(), get_registry_url(registry)
    if request.experiment is None:
        reason = f"a run is probed as it was trained; only {', '.join(FREE)} may be changed"
        check_sections(changes, FREE, reason)
    with open_target(request.target, request.experiment, url) as target:
        spec, settings = _build_probe_spec(target, changes, request.cut)
        setup = build_setup(spec)
        with load_model(spec, target.model) as model:
            context = build_probe_context(setup, model.policy, model.sampler, model.pool)
            result = probe_problems(
                settings, context, spec.seed, None, lambda at: show(at.done, at.total)
            )
    step = target.run.step if target.run else 0
    probes = build_probe_records(result, settings, spec.seed, step)
    if not probes:
        bare = sum(a.reasoning is None for a in result.answered)
        raise SpecError(
            f"none of {len(result.answered)} answers could be probed: {bare} have no span "
            f"{settings.span!r}"
        )
    if target.run is not None:
        probes = _name_probe_suites(probes, target.run)
    found = ModelProbe(target, result, tuple(probes))
    if record and target.run is not None:
        recorded = _record_new_probes(found, target.run, url, again, report)
        return replace(found, recorded=tuple(recorded))
    return found


def _record_new_probes(
    found: ModelProbe, run: RunRecord, url: str, again: bool, report: Report
) -> list[str]:
    """Adds the probes that a run lacks to its records; returns their suites."""
    probes = found.probes
    folder, step = locate_run_folder(run), probes[0].step
    with open_registry(url, read_only=False) as registry:
        there = {e.suite for e in registry.results.evaluations(run.id, "probe/") if e.step == step}
        new = [one for one in probes if again or f"probe/{one.suite}" not in there]
        if old := [one.suite for one in probes if one not in new]:
            report(
                f"{run.id} has this already: {', '.join(old)}; --again records it anew", err=True
            )
        if not new:
            return []
        # A separate file, so that the samples of earlier probes are kept.
        marks = compute_settings_digest({one.suite: one.figures["settings"] for one in probes})
        path = folder.probe(step)
        path = path.with_name(f"{path.stem}_{marks}{path.suffix}")
        recorder = Recorder(registry, run.id, keep_bodies=True)
        record_probe_results(recorder, new, found.result, "after", path)
        draw_probes(registry, run.id, folder)
        update_trackers(registry, run, report)
    return [one.suite for one in new]


def _build_probe_spec(
    target: TrainedModel, overrides: Sequence[str], cut: str | None
) -> tuple[ExperimentSpec, ProbeSpec]:
    """Returns the experiment with the overrides applied, and its own or default probe settings.

    Raises:
        InvalidSpec: the overrides do not fit.
    """
    if not target.document.tree.get("probe"):
        target = replace(target, document=apply_overrides(target.document, ["probe={}"]))
    written = target.document.tree["probe"]
    own = written.get("cut") if isinstance(written, dict) else None
    by = own.get("by", "fraction") if isinstance(own, dict) else "fraction"
    if cut is not None and cut != by:
        overrides = (f"probe.cut={{by: {cut}}}", *overrides)
    spec = target.read_spec(overrides)
    return spec, spec.probe or ProbeSpec()


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
