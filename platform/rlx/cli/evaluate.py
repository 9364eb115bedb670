"""`rlx eval`: measures a trained model."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rlx import results
from rlx.cli.output import print_json, print_text
from rlx.cli.progress import open_progress
from rlx.cli.verb_group import json_option, overrides_option, registry_option
from rlx.errors import SpecError
from rlx.home import format_path
from rlx.launch import child_environment
from rlx.results import ProbeRequest, probe_model
from rlx.text import escape_unprintable, explain_write_errors

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command("eval")
@click.argument("target", metavar="RUN|MODEL")
@click.option(
    "--at",
    "step",
    type=click.IntRange(0),
    metavar="STEP",
    help="Evaluate RUN at this checkpoint.",
)
@click.option(
    "--spec", "experiment", type=_FILE, metavar="FILE", help="Experiment file of a MODEL."
)
@click.option("--suite", type=_FILE, metavar="FILE", help="YAML file with held-out sets.")
@click.option("--problems", type=_COUNT, help="Problems per set; with --probe of all.")
@click.option(
    "--samples", type=_COUNT, help="Answers per problem; with --probe continuations per cut point."
)
@click.option(
    "--with",
    "tool",
    metavar="TOOL:TASK",
    help="Have another tool evaluate it: lm_eval:TASK, or inspect:FILE.",
)
@click.option(
    "--python", metavar="PATH", help="With --with: an interpreter that has the tool, if not this."
)
@click.option("--greedy", is_flag=True, help="Use greedy decoding.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Seed of problems and sampling.")
@click.option("--probe", "probes", is_flag=True, help="Probe the reasoning instead.")
@click.option(
    "--scheme",
    "schemes",
    type=click.Choice(["early_answering", "filler", "mistake"]),
    multiple=True,
    help="With --probe: how to alter the reasoning; can be repeated.",
)
@overrides_option("KEY=VALUE", "Override a runner or sampler value; with --probe, a probe value.")
@json_option
@click.option("--pictures", type=_FILE, metavar="FOLDER", help="Write plots to this folder.")
@click.option(
    "--out",
    type=_FILE,
    metavar="FILE",
    help="Write every answer as JSON Lines; with --probe, as Parquet.",
)
@click.option("--record/--no-record", default=True, help="Add the results to RUN's records.")
@registry_option
def evaluate(
    as_json: bool,
    pictures: Path | None,
    out: Path | None,
    record: bool,
    tool: str | None,
    python: str | None,
    probes: bool,
    schemes: tuple[str, ...],
    url: str,
    **options: Any,
) -> None:
    """Evaluate a trained model on held-out problems: accuracy and calibration, with intervals.

    Evaluates the exported model of RUN, or one of its checkpoints; or a MODEL, given by its folder
    or hub name, with the experiment of --spec. Without --suite, the sets are the experiment's own:
    its task and `evaluation.variants`. Answers are cached: repeat an interrupted command to
    continue where it stopped.

    With --with, lm-eval or Inspect evaluates it over OpenAI's interface, with --problems samples
    per task; the figures are recorded beside rlx's own.

    With --probe, its reasoning is cut or altered, to measure how often the answer is still right;
    options override the experiment's `probe:` section.
    """
    if tool is not None:
        _check_tool_options({**options, "probe": probes, "pictures": pictures, "out": out})
        _evaluate_with(tool, python, as_json=as_json, record=record, url=url, **options)
        return
    if python is not None:
        raise SpecError("--python belongs to --with")
    _check_mode(probes, {"scheme": schemes}, options)
    if probes:
        asked = {name: options[name] for name in _SHARED}
        probe = ProbeRequest(**asked, schemes=schemes)
        _probe(probe, as_json=as_json, pictures=pictures, out=out, record=record, url=url)
        return
    request = results.EvaluationRequest(**options)
    require_places(out, pictures)
    os.environ.update(child_environment())  # before transformers is imported
    with open_progress("starting", "problems") as show:
        found = results.evaluate(request, registry=url, record=record, show=show, report=print_text)
    if out is not None:
        with explain_write_errors(out):
            lines = "".join(json.dumps(answer) + "\n" for answer in found.list_answers())
            out.write_text(lines, encoding="utf-8")
    if pictures is not None:
        found.draw_pictures(pictures)
    if found.recorded is not None and (run := found.target.run) is not None:
        at = run.step if found.target.step is None else found.target.step
        folder = format_path(found.recorded)
        print_text(f"recorded for {run.id} after step {at}; {folder}/", err=True)
    if as_json:
        print_json(found.to_json(), allow_nan=False)
    else:
        from rlx.cli.tables import show_suite

        show_suite(found.suite, found.figures)
        sys.stdout.flush()


_OF_TOOLS = ("target", "step", "problems", "overrides")
"""Options that another tool's evaluation has too."""


def _check_tool_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _OF_TOOLS and value not in (None, False, ()):
            option = {"experiment": "spec"}.get(name, name)
            raise SpecError(f"--{option} is not for --with")


def _evaluate_with(
    tool: str,
    python: str | None,
    *,
    target: str,
    step: int | None,
    problems: int | None,
    overrides: tuple[str, ...],
    as_json: bool,
    record: bool,
    url: str,
    **_: Any,
) -> None:
    """Has another tool evaluate a model, and shows what it found."""
    os.environ.update(child_environment())  # before transformers is imported
    found = results.evaluate_with(
        tool,
        target if step is None else f"{target}@{step}",
        python=python or sys.executable,
        limit=problems,
        overrides=overrides,
        registry=url,
        record=record,
        report=print_text,
    )
    if found.recorded is not None:
        print_text(f"recorded for {found.recorded}", err=True)
    if as_json:
        print_json(found.to_json())
        return
    from rlx.cli.console import print_table

    rows = [
        (task, name, f"{value:.4f}" if isinstance(value, float) else str(value))
        for task, figures in found.figures.items()
        for name, value in figures.items()
        if value is not None
    ]
    print_table("TASK", "METRIC", "VALUE", rows=rows)


_SHARED = ("target", "experiment", "problems", "samples", "seed", "overrides")
"""Options of a request that an evaluation and a probe have in common."""


def _check_mode(
    probes: bool, of_probes: Mapping[str, Any], of_evaluations: Mapping[str, Any]
) -> None:
    """Checks that no option belongs to what is not asked for.

    Raises:
        SpecError: one does.
    """
    others = {"at": "step", "suite": "suite", "greedy": "greedy"}
    named = {option: of_evaluations[name] for option, name in others.items()}
    for option, value in (named if probes else of_probes).items():
        if value is not None and value is not False and value != ():
            raise SpecError(f"--{option} is {'not for' if probes else 'only for'} --probe")


def require_places(out: Path | None, pictures: Path | None) -> None:
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


def _probe(
    request: ProbeRequest,
    *,
    as_json: bool,
    pictures: Path | None,
    out: Path | None,
    record: bool,
    url: str,
) -> None:
    """Cuts or alters a model's reasoning, and shows how often the answer is still right."""
    if out is not None and out.is_dir():
        raise SpecError(f"--out {escape_unprintable(str(out))} is a folder; name a file in it")
    os.environ.update(child_environment())  # before transformers is imported
    with open_progress("probing", "problems") as show:
        found = probe_model(request, registry=url, record=record, show=show, report=print_text)
    if out is not None:
        found.write_samples(out)
    if pictures is not None:
        with explain_write_errors(pictures):
            pictures.mkdir(parents=True, exist_ok=True)
        found.draw_pictures(pictures / "probe")
    if found.recorded:
        step = found.probes[0].step
        print_text(f"recorded as a probe of {found.target.name} after step {step}", err=True)
    if as_json:
        print_json(found.to_json(), allow_nan=False)
    else:
        from rlx.cli.console import open_console
        from rlx.cli.tables import show_probes

        show_probes(found.probes, open_console())
        sys.stdout.flush()
