"""`rlx probe`: measures how much a trained model's answers depend on its reasoning."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx import results
from rlx.cli.options import json_option, overrides_option, registry_option
from rlx.cli.output import print_json, print_text
from rlx.cli.progress import open_progress
from rlx.errors import SpecError
from rlx.launch import child_environment
from rlx.text import escape_unprintable

if TYPE_CHECKING:
    from rlx.probe import RecordedProbe

__all__ = ["probe"]

_FILE = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("target", metavar="RUN|MODEL")
@click.option(
    "--spec", "experiment", type=_FILE, metavar="FILE", help="Experiment file of a MODEL."
)
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
@overrides_option("PROBE.KEY=VALUE")
@json_option
@click.option(
    "--picture", type=_FILE, metavar="FILE", help="Plot the curves to FILE.png and FILE.svg."
)
@click.option("--out", type=_FILE, metavar="FILE", help="Write every sample as Parquet.")
@click.option("--record/--no-record", default=True, help="Add the results to RUN's records.")
@click.option("--again", is_flag=True, help="Record the probe even if the run has it already.")
@registry_option
def probe(
    as_json: bool,
    picture: Path | None,
    out: Path | None,
    record: bool,
    again: bool,
    url: str,
    **options: Any,
) -> None:
    """Cut or alter a trained model's reasoning, and measure how often the answer is still right.

    Probes the exported model of RUN, with the run's own task, rewards and rollout; or a MODEL,
    given by its folder or hub name, with those of the experiment of --spec. Options override the
    experiment's `probe:` section.
    """
    for name, path in (("--picture", picture), ("--out", out)):
        if path is not None and path.is_dir():
            raise SpecError(
                f"{name} {escape_unprintable(str(path))} is a folder; name a file in it"
            )
    os.environ.update(child_environment())  # before transformers is imported
    with open_progress("probing", "problems") as show:
        request = results.ProbeRequest(**options)
        found = results.probe_model(
            request, registry=url, record=record, again=again, show=show, report=print_text
        )
    if out is not None:
        found.write_samples(out)
    if picture is not None:
        found.draw_pictures(picture)
    if found.recorded:
        step = found.probes[0].step
        print_text(f"recorded as a probe of {found.target.name} after step {step}", err=True)
    if as_json:
        print_json(found.to_json(), allow_nan=False)
    else:
        _show_probe_results(found.probes)


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
