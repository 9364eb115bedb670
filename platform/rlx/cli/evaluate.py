"""`rlx eval`: accuracy and calibration of a trained model, in and out of distribution."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from rlx import results
from rlx.cli.options import json_option, overrides_option, registry_option
from rlx.cli.output import print_json, print_text
from rlx.cli.progress import open_progress
from rlx.home import format_path
from rlx.launch import child_environment
from rlx.writing import explain_write_errors

__all__ = ["evaluate"]

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
@click.option("--problems", type=_COUNT, help="Problems per set.")
@click.option("--samples", type=_COUNT, help="Answers per problem.")
@click.option("--greedy", is_flag=True, help="Use greedy decoding.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Seed of problems and sampling.")
@overrides_option("KEY=VALUE", "Override a runner or sampler value.")
@json_option
@click.option("--pictures", type=_FILE, metavar="FOLDER", help="Write plots to this folder.")
@click.option("--out", type=_FILE, metavar="FILE", help="Write every answer as JSON Lines.")
@click.option("--record/--no-record", default=True, help="Add the results to RUN's records.")
@registry_option
def evaluate(
    as_json: bool, pictures: Path | None, out: Path | None, record: bool, url: str, **options: Any
) -> None:
    """Evaluate a trained model on held-out problems: accuracy and calibration, with intervals.

    Evaluates the exported model of RUN, or one of its checkpoints; or a MODEL, given by its folder
    or hub name, with the experiment of --spec. Without --suite, the sets are the experiment's own:
    its task and `evaluation.variants`. Answers are cached: repeat an interrupted command to
    continue where it stopped.
    """
    os.environ.update(child_environment())  # before transformers is imported
    request = results.EvaluationRequest(**options)
    require_places(out, pictures)
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
        from rlx.cli.suite_tables import show_suite

        show_suite(found.suite, found.figures)
        sys.stdout.flush()


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
