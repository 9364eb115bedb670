"""`rlx eval`: measures a trained model."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from rlx import results
from rlx.cli import run_summary
from rlx.cli.output import print_json, print_text
from rlx.cli.progress import open_progress
from rlx.cli.tables import print_table
from rlx.cli.verb_group import json_option, overrides_option, registry_option
from rlx.errors import SpecError
from rlx.home import format_path
from rlx.launch import child_environment
from rlx.text import explain_write_errors

_FOR = {
    "step": ("--at", ("", "--with")),
    "experiment": ("--spec", ("", "--probe")),
    "suite": ("--suite", ("",)),
    "samples": ("--samples", ("", "--probe")),
    "greedy": ("--greedy", ("",)),
    "seed": ("--seed", ("", "--probe")),
    "schemes": ("--scheme", ("--probe",)),
    "pictures": ("--pictures", ("", "--probe")),
    "out": ("--out", ("", "--probe")),
    "python": ("--python", ("--with",)),
}
"""Of options that are not for all: the flag, and the modes that it is for, of which "" is none."""
_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command("eval")
@click.argument("target", metavar="RUN|MODEL")
@click.option("--at", "step", type=click.IntRange(0), metavar="STEP", help="At this checkpoint.")
@click.option("--spec", "experiment", type=_FILE, metavar="FILE", help="Experiment of a MODEL.")
@click.option("--suite", type=_FILE, metavar="FILE", help="YAML file with held-out sets.")
@click.option("--problems", type=_COUNT, help="Problems per set; with --probe of all.")
@click.option("--samples", type=_COUNT, help="Answers per problem; with --probe, per cut point.")
@click.option("--with", "tool", metavar="TOOL:TASK", help="Use lm_eval:TASK, or inspect:FILE.")
@click.option("--python", metavar="PATH", help="With --with: an interpreter that has the tool.")
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
    "--out", type=_FILE, metavar="FILE", help="Write answers as JSON Lines; with --probe, Parquet."
)
@click.option("--record/--no-record", default=True, help="Add the results to RUN's records.")
@registry_option
def evaluate(
    as_json: bool, record: bool, tool: str | None, probes: bool, url: str, **options: Any
) -> None:
    """Evaluate a trained model on held-out problems: accuracy and calibration, with intervals.

    Evaluates the exported model of RUN, or one of its checkpoints; or a MODEL, given by its folder
    or hub name, with the experiment of --spec. Without --suite, the sets are the experiment's own:
    its task and `evaluation.variants`. Answers are kept: repeat an interrupted command to go
    on where it stopped.

    With --with, lm-eval or Inspect evaluates it over OpenAI's interface, with --problems samples
    per task; the figures are recorded beside rlx's own.

    With --probe, its reasoning is cut or altered, to measure how often the answer is still right;
    options override the experiment's `probe:` section.
    """
    if tool is not None and probes:
        raise SpecError("--probe is not for --with")
    mode = "--with" if tool is not None else "--probe" if probes else ""
    for name, (flag, modes) in _FOR.items():
        is_given = options[name] is not None and options[name] is not False and options[name] != ()
        if is_given and mode not in modes:
            which = f"only for {modes[0]}" if not mode else f"not for {mode}"
            raise SpecError(f"{flag} is {which}")
    asked = {n: options[n] for n in options if n not in _FOR or mode in _FOR[n][1]}
    os.environ.update(child_environment())  # before transformers is imported
    told = {"registry": url, "record": record, "report": print_text}
    if tool is not None:
        _evaluate_with(tool, asked, as_json=as_json, **told)
        return
    out, pictures = asked.pop("out"), asked.pop("pictures")
    require_places(out, pictures)
    if probes:
        _probe(asked, out, pictures, as_json=as_json, **told)
    else:
        _evaluate_suite(asked, out, pictures, as_json=as_json, **told)
    sys.stdout.flush()


def _evaluate_suite(
    asked: dict[str, Any], out: Path | None, pictures: Path | None, *, as_json: bool, **told: Any
) -> None:
    with open_progress("starting", "problems") as show:
        found = results.evaluate(**asked, show=show, **told)
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
        run_summary.show_suite(found.suite, found.figures)


def _probe(
    asked: dict[str, Any], out: Path | None, pictures: Path | None, *, as_json: bool, **told: Any
) -> None:
    with open_progress("probing", "problems") as show:
        found = results.probe_model(**asked, show=show, **told)
    if out is not None:
        found.write_samples(out)
    if pictures is not None:
        found.draw_pictures(pictures / "probe")
    if found.recorded:
        step = found.probes[0].step
        print_text(f"recorded as a probe of {found.target.name} after step {step}", err=True)
    if as_json:
        print_json(found.to_json(), allow_nan=False)
    else:
        run_summary.show_probes(found.probes)


def _evaluate_with(tool: str, asked: dict[str, Any], *, as_json: bool, **told: Any) -> None:
    target, step = asked["target"], asked["step"]
    found = results.evaluate_with(
        tool,
        target if step is None else f"{target}@{step}",
        python=asked["python"] or sys.executable,
        limit=asked["problems"],
        overrides=asked["overrides"],
        **told,
    )
    if found.recorded is not None:
        print_text(f"recorded for {found.recorded}", err=True)
    if as_json:
        print_json(found.to_json())
        return
    rows = [
        (task, name, f"{value:.4f}" if isinstance(value, float) else str(value))
        for task, figures in found.figures.items()
        for name, value in figures.items()
        if value is not None
    ]
    print_table("TASK", "METRIC", "VALUE", rows=rows)


def require_places(out: Path | None, pictures: Path | None) -> None:
    """Raises EnvironmentFault, before any answer is sampled, where results cannot be written."""
    if out is not None and not out.is_fifo():  # whose reader would see its end
        is_new = not out.exists()
        with explain_write_errors(out):
            out.open("ab").close()
        if is_new:
            out.resolve().unlink()
    if pictures is not None:
        with explain_write_errors(pictures):
            pictures.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=pictures).close()
