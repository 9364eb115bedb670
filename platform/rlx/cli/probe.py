"""`rlx probe`: measures how much a trained model's answers depend on its reasoning."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx.checks import check_read_spec, validate_document
from rlx.cli.output import format_json, print_text
from rlx.cli.progress_bar import open_progress_bar
from rlx.cli.registry import locate_run_folder, open_registry, registry_option
from rlx.cli.trained_model import model_target, run_target, update_mlflow_mirror
from rlx.cli.writing import explain_write_errors
from rlx.errors import SpecError
from rlx.launch import child_environment
from rlx.spec import ExperimentSpec, ProbeSpec
from rlx.spec.reading import YamlDocument, apply_overrides
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

if TYPE_CHECKING:
    from rlx.probe import ProbeResult, RecordedProbe

__all__ = ["probe"]

FREE = ("probe", "runner", "sampler", "seed")
"""Spec sections that may be overridden; the others define what was trained."""

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class _Target:
    """The model to probe.

    Attributes:
        name: name in messages and titles.
        spec: the experiment, with a `probe:` section.
        model: folder of the model, or its name on the hub.
        run: the run that exported the model; None for a MODEL.
    """

    name: str
    spec: ExperimentSpec
    model: str
    run: RunRecord | None


@click.command()
@click.argument("target", metavar="RUN|MODEL")
@click.option("--spec", "file", type=_FILE, metavar="FILE", help="Experiment file of a MODEL.")
@click.option("--problems", type=_COUNT, help="Number of held-out problems.")
@click.option("--samples", type=_COUNT, help="Continuations per cut point.")
@click.option(
    "--scheme",
    "schemes",
    type=click.Choice(["early_answering", "filler", "mistake"]),
    multiple=True,
    help="How to alter the reasoning; can be repeated.",
)
@click.option("--cut", type=click.Choice(["fraction", "sentence", "token"]), help="Where to cut.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Seed of problems and sampling.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PROBE.KEY=VALUE",
    help="Override a value; can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--picture", type=_FILE, metavar="FILE", help="Plot the curves to FILE.png and FILE.svg."
)
@click.option("--out", type=_FILE, metavar="FILE", help="Write every sample as Parquet.")
@click.option("--record/--no-record", default=True, help="Add the results to RUN's records.")
@click.option("--again", is_flag=True, help="Record the probe even if the run has it already.")
@registry_option
def probe(
    target: str,
    file: Path | None,
    problems: int | None,
    samples: int | None,
    schemes: tuple[str, ...],
    cut: str | None,
    seed: int | None,
    overrides: tuple[str, ...],
    as_json: bool,
    picture: Path | None,
    out: Path | None,
    record: bool,
    again: bool,
    url: str,
) -> None:
    """Cut or alter a trained model's reasoning, and measure how often the answer is still right.

    Probes the exported model of RUN, with the run's own task, rewards and rollout; or a MODEL,
    given by its folder or hub name, with those of the experiment of --spec. Options override the
    experiment's `probe:` section.
    """
    options = {"problems": problems, "samples": samples, "schemes": list(schemes) or None}
    named = [f"probe.{key}={json.dumps(v)}" for key, v in options.items() if v is not None]
    named += [] if seed is None else [f"seed={seed}"]
    changes = (*overrides, *named)
    found = (
        _build_run_target(target, changes, cut, url)
        if file is None
        else _build_model_target(target, file, changes, cut)
    )
    for name, path in (("--picture", picture), ("--out", out)):
        if path is not None and path.is_dir():
            raise SpecError(
                f"{name} {escape_unprintable(str(path))} is a folder; name a file in it"
            )
    outcome, probes = _run_target_probe(found)
    if out is not None:
        _write_probe_samples(outcome, out)
    if picture is not None:
        _draw_probe_pictures(probes, picture)
    kept = (
        _record_new_probes(found, outcome, probes, url, again=again) if record and found.run else []
    )
    if as_json:
        print_text(format_json(_build_probe_json(found, probes, kept), indent=2, allow_nan=False))
    else:
        _show_probe_results(probes)


# Target ----------------------------------------------------------------------------------------


def _build_run_target(name: str, overrides: Sequence[str], cut: str | None, url: str) -> _Target:
    fixed = sorted({o for o in overrides if o.partition("=")[0].split(".")[0] not in FREE})
    if fixed:
        raise SpecError(
            f"--set {escape_unprintable(fixed[0])}: a run is probed as it was trained; only "
            f"{', '.join(FREE)} may be changed"
        )
    found = run_target(name, url)
    return _Target(
        found.name, _build_probe_spec(found.document, overrides, cut), found.model, found.run
    )


def _build_model_target(
    name: str, file: Path, overrides: Sequence[str], cut: str | None
) -> _Target:
    found = model_target(name, file)
    return _Target(found.name, _build_probe_spec(found.document, overrides, cut), found.model, None)


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


# Probing ---------------------------------------------------------------------------------------


def _run_target_probe(target: _Target) -> "tuple[ProbeResult, list[RecordedProbe]]":
    """Probes the model; returns the samples and one record per scheme.

    Raises:
        SpecError: no answer could be probed.
    """
    os.environ.update(child_environment())  # before transformers is imported
    from rlx.audit import probe_exported
    from rlx.probe import compute_settings_digest
    from rlx.run import build_probe_records

    spec = target.spec
    settings = spec.probe or ProbeSpec()
    with open_progress_bar("probing", "problems") as show:
        found = probe_exported(spec, target.model, lambda at: show(at.done, at.total))
    probes = build_probe_records(found, settings, spec.seed, target.run.step if target.run else 0)
    if not probes:
        bare = sum(a.reasoning is None for a in found.answered)
        raise SpecError(
            f"none of {len(found.answered)} answers could be probed: {bare} have no span "
            f"{settings.span!r}, and {found.unprobed} did not fit into probe.max_tokens"
        )
    if target.run is None:
        return found, probes
    own = _get_run_probe_settings(target.run)
    return found, [
        one
        if one.settings == own.get(one.scheme)
        else _rename_probe_suite(one, compute_settings_digest(one.settings))
        for one in probes
    ]


def _get_run_probe_settings(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Returns the settings of the run's own probe, by scheme."""
    from rlx.probe import settings_of

    spec = ExperimentSpec.model_validate_json(json.dumps(run.spec), strict=True)
    own = spec.probe or ProbeSpec()
    return {s: settings_of(own, s, spec.seed) for s in ("early_answering", "filler", "mistake")}


def _rename_probe_suite(one: "RecordedProbe", digest: str) -> "RecordedProbe":
    """Returns a probe whose settings differ from the run's own under a separate suite name."""
    from dataclasses import replace

    return replace(one, suite=f"{one.suite}/{digest}")


# Results ---------------------------------------------------------------------------------------


def _record_new_probes(
    target: _Target,
    found: "ProbeResult",
    probes: "Sequence[RecordedProbe]",
    url: str,
    *,
    again: bool,
) -> list[str]:
    """Adds the probes that the run lacks to its records; returns the suites added."""
    from rlx.audit import draw_probes
    from rlx.probe import compute_settings_digest
    from rlx.record import Recorder
    from rlx.run import record_probe_results

    run = target.run
    if run is None:
        return []
    folder, step = locate_run_folder(run), probes[0].step
    with open_registry(url, read_only=False) as registry:
        there = {e.suite for e in registry.results.evaluations(run.id, "probe/") if e.step == step}
        new = [one for one in probes if again or f"probe/{one.suite}" not in there]
        if old := [one.suite for one in probes if one not in new]:
            print_text(
                f"{run.id} has this already: {', '.join(old)}; --again records it anew", err=True
            )
        if not new:
            return []
        # A separate file, so that the samples of earlier probes are kept.
        marks = compute_settings_digest({one.suite: one.settings for one in probes})
        path = folder.probe(step)
        path = path.with_name(f"{path.stem}_{marks}{path.suffix}")
        record_probe_results(
            Recorder(registry, run.id, keep_bodies=True), new, found, "after", path
        )
        draw_probes(registry, run.id, folder)
        update_mlflow_mirror(registry, run)
    print_text(f"recorded as a probe of {run.id} after step {step}", err=True)
    return [one.suite for one in new]


def _write_probe_samples(found: "ProbeResult", path: Path) -> None:
    from rlx.record import probe_table
    from rlx_registry import write_body

    with explain_write_errors(path):
        write_body(path, probe_table(found))


def _draw_probe_pictures(probes: "Sequence[RecordedProbe]", path: Path) -> None:
    """Plots the probe curves, and stated against sampled confidence where it was stated."""
    from rlx.probe import draw_probe_curves, draw_verbal_against_sampled

    with explain_write_errors(path):
        draw_probe_curves(probes, path)
        if any(one.verbal for one in probes):
            stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
            draw_verbal_against_sampled(probes, stem.with_name(f"{stem.name}-verbal_conf"))


def _show_probe_results(probes: "Sequence[RecordedProbe]") -> None:
    from rlx.cli.console import open_console
    from rlx.cli.probe_tables import show_probes
    from rlx.probe import render_probe_curve

    console = open_console()
    show_probes(probes, console)
    for one in probes:
        console.print(f"\n{one.suite}", style="bold")
        console.print(render_probe_curve(one.figures, width=min(80, console.width)))
    sys.stdout.flush()


def _build_probe_json(
    target: _Target, probes: "Sequence[RecordedProbe]", kept: Sequence[str]
) -> dict[str, Any]:
    from dataclasses import asdict

    from rlx.probe import compute_agreement

    found = [compute_agreement(one.verbal) for one in probes]
    stated = next((asdict(one) for one in found if one is not None), None)
    return {
        "run": target.run.id if target.run else None,
        "model": target.model,
        "step": probes[0].step if target.run else None,
        "recorded": list(kept),
        "probes": {one.suite: one.to_json() for one in probes},
        "verbal_conf_against_mc_p_correct": stated,
    }
