"""Probes a trained model: how much its answers depend on its reasoning; records it with its run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.assess.target import TrainedModel, check_sections, open_target
from rlx.checks import check_read_spec, validate_document
from rlx.errors import SpecError
from rlx.launch import (
    get_registry_url,
    locate_run_folder,
    open_registry,
    send_run_folder,
)
from rlx.record import update_trackers
from rlx.reporting import Report, ShowProgress, ignore_progress, log_report
from rlx.spec import ExperimentSpec, ProbeSpec
from rlx.spec.reading import YamlDocument, apply_overrides
from rlx.writing import explain_write_errors
from rlx_registry import RunRecord, write_body

if TYPE_CHECKING:
    from rlx.probe import ProbeResult, RecordedProbe  # bring torch

__all__ = ["ModelProbe", "ProbeRequest", "probe_model"]

FREE = ("probe", "runner", "sampler", "seed")
"""Spec sections that may be overridden; the others define what was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to probe, and how; None takes the setting of the experiment's `probe:` section.

    Attributes:
        target: a run, or the folder or hub name of a model.
        experiment: file of a model's experiment; None for a run, which has its own.
        problems: number of held-out problems.
        samples: continuations per cut point.
        schemes: how to alter the reasoning; empty takes the experiment's.
        cut: where to cut: `fraction`, `sentence` or `token`.
        seed: seed of problems and sampling.
        overrides: `key=value`; of a run only of the sections `probe`, `runner`, `sampler`, `seed`.
    """

    target: str
    experiment: Path | None = None
    problems: int | None = None
    samples: int | None = None
    schemes: tuple[str, ...] = ()
    cut: str | None = None
    seed: int | None = None
    overrides: tuple[str, ...] = ()

    def list_overrides(self) -> tuple[str, ...]:
        """Returns the overrides and the settings as `key=value`; the settings win."""
        probe = {"problems": self.problems, "samples": self.samples}
        settings: dict[str, Any] = {f"probe.{name}": value for name, value in probe.items()}
        settings |= {"probe.schemes": list(self.schemes) or None, "seed": self.seed}
        named = [f"{key}={json.dumps(v)}" for key, v in settings.items() if v is not None]
        return (*self.overrides, *named)


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
    result: "ProbeResult"
    probes: "tuple[RecordedProbe, ...]"
    recorded: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain JSON values, as `rlx probe --json` prints them."""
        from rlx.probe import compute_agreement

        found = [compute_agreement(one.verbal) for one in self.probes]
        stated = next((asdict(one) for one in found if one is not None), None)
        return {
            "run": self.target.run.id if self.target.run else None,
            "model": self.target.model,
            "step": self.probes[0].step if self.target.run else None,
            "recorded": list(self.recorded),
            "probes": {one.suite: one.to_json() for one in self.probes},
            "verbal_conf_against_mc_p_correct": stated,
        }

    def write_samples(self, path: Path) -> None:
        """Writes every sample as Parquet.

        Raises:
            EnvironmentFault: the file cannot be written.
        """
        from rlx.record import probe_table

        with explain_write_errors(path):
            write_body(path, probe_table(self.result))

    def draw_pictures(self, path: Path) -> None:
        """Draws the probe curves, and stated against sampled confidence where it was stated.

        Args:
            path: of a `.png`; an `.svg` is written beside it.

        Raises:
            EnvironmentFault: the file cannot be written.
        """
        from rlx.probe import draw_probe_curves, draw_verbal_against_sampled

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
        spec = _build_probe_spec(target.document, changes, request.cut)
        from rlx.audit import probe_exported  # a request that is refused needs no torch
        from rlx.run import build_probe_records

        settings = spec.probe or ProbeSpec()
        result = probe_exported(spec, target.model, lambda at: show(at.done, at.total))
    step = target.run.step if target.run else 0
    probes = build_probe_records(result, settings, spec.seed, step)
    if not probes:
        bare = sum(a.reasoning is None for a in result.answered)
        raise SpecError(
            f"none of {len(result.answered)} answers could be probed: {bare} have no span "
            f"{settings.span!r}, and {result.unprobed} did not fit into probe.max_tokens"
        )
    own = None if target.run is None else _get_run_probe_settings(target.run)
    found = ModelProbe(target, result, tuple(_name_probe_suite(one, own) for one in probes))
    if record and target.run is not None:
        recorded = _record_new_probes(found, target.run, url, again, report)
        return replace(found, recorded=tuple(recorded))
    return found


def _record_new_probes(
    found: ModelProbe, run: RunRecord, url: str, again: bool, report: Report
) -> list[str]:
    """Adds the probes that a run lacks to its records; returns their suites."""
    from rlx.audit import draw_probes
    from rlx.probe import compute_settings_digest
    from rlx.record import Recorder
    from rlx.run import record_probe_results

    probes = found.probes
    folder, step = locate_run_folder(run, "probes"), probes[0].step
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
        marks = compute_settings_digest({one.suite: one.settings for one in probes})
        path = folder.probe(step)
        path = path.with_name(f"{path.stem}_{marks}{path.suffix}")
        recorder = Recorder(registry, run.id, keep_bodies=True)
        record_probe_results(recorder, new, found.result, "after", path)
        draw_probes(registry, run.id, folder)
        send_run_folder(run)
        update_trackers(registry, run, report)
    return [one.suite for one in new]


def _build_probe_spec(
    document: YamlDocument, overrides: Sequence[str], cut: str | None
) -> ExperimentSpec:
    """Returns the experiment with its own or default probe settings, and the overrides applied.

    Raises:
        InvalidSpec: the overrides do not fit.
    """
    if not document.tree.get("probe"):
        document = apply_overrides(document, ["probe={}"])
    written = document.tree["probe"].get("cut") if isinstance(document.tree["probe"], dict) else {}
    own = written.get("by", "fraction") if isinstance(written, dict) else "fraction"
    if cut is not None and cut != own:
        overrides = (f"probe.cut={{by: {cut}}}", *overrides)
    document = apply_overrides(document, overrides)
    read = validate_document(document, Path(document.file))
    check_read_spec(read)
    return read.spec


def _get_run_probe_settings(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Returns the settings of the run's own probe, by scheme."""
    from rlx.probe import settings_of

    spec = ExperimentSpec.model_validate_json(json.dumps(run.spec), strict=True)
    own = spec.probe or ProbeSpec()
    return {s: settings_of(own, s, spec.seed) for s in ("early_answering", "filler", "mistake")}


def _name_probe_suite(
    one: "RecordedProbe", own: Mapping[str, dict[str, Any]] | None
) -> "RecordedProbe":
    """Names the suite of a probe whose settings differ from the run's own after the settings."""
    from rlx.probe import compute_settings_digest

    if own is None or one.settings == own.get(one.scheme):
        return one
    return replace(one, suite=f"{one.suite}/{compute_settings_digest(one.settings)}")
