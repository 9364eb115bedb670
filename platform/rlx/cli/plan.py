"""`rlx plan`: what an experiment would do to every token, without a model."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlx.cli.text import color_report
from rlx.discovery import check_file
from rlx.errors import EnvironmentFault, SpecError
from rlx.spec.reading import format_diagnostic
from rlx.text import escape_unprintable

if TYPE_CHECKING:
    from rlx.plan import PhaseReport, PlanReport

__all__ = ["plan"]

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("spec", type=_FILE, metavar="SPEC")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH.TO.KEY=VALUE",
    help="Change one value; may be repeated.",
)
@click.option("--row", "numbers", type=int, multiple=True, help="Show this row; may be repeated.")
@click.option("--rows", "every", type=click.Choice(["all"]), help="Show all of them.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON document.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write a page that stands on its own.")
def plan(
    spec: Path,
    overrides: tuple[str, ...],
    numbers: tuple[int, ...],
    every: str | None,
    as_json: bool,
    html: Path | None,
) -> int:
    """Show what every token would get: rewards, KL, advantages. Loads no model, fetches nothing.

    Responses are made up; problems, tokens, rewards, mask, placement, estimator and weights are the
    experiment's own.
    """
    if html is not None and html.is_dir():
        raise SpecError(f"--html {escape_unprintable(str(html))} is a folder; name a file in it")
    read, plugins = check_file(spec, overrides)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # before anything imports the hub
        os.environ.setdefault(name, "1")
    from rlx.plan import build_plan

    report = build_plan(spec, read, plugins)
    shown = [_select_plan_rows(phase, numbers, every is not None) for phase in report.phases]
    if html is not None:
        _write_plan_page(report, shown, html)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
        return report.exit_code
    from rich.console import Console

    from rlx.plan import show_plan

    show_plan(report, shown, Console(highlight=False, soft_wrap=False))
    sys.stdout.flush()
    _print_plan_findings(report, spec)
    return report.exit_code


def _select_plan_rows(phase: "PhaseReport", numbers: Sequence[int], every: bool) -> Sequence[int]:
    if every:
        return [row.row for row in phase.rows]
    there = {row.row for row in phase.rows}
    if there and (missing := sorted(set(numbers) - there)):
        raise SpecError(f"--row {missing[0]}: there are rows 0 to {max(there)}")
    return [n for n in numbers if n in there] or phase.shown


def _print_plan_findings(report: "PlanReport", spec: Path) -> None:
    """Errors and warnings, as `rlx validate` prints them."""
    for finding in report.findings:
        click.echo("\n" + color_report(format_diagnostic(finding, str(spec)), sys.stderr), err=True)
    errors = sum(f.severity == "error" for f in report.findings)
    if errors:
        told = "1 error" if errors == 1 else f"{errors} errors"
        click.echo(f"\n{escape_unprintable(str(spec))}: {told}", err=True)


def _write_plan_page(report: "PlanReport", shown: Sequence[Sequence[int]], file: Path) -> None:
    from rlx.plan import render_plan_page

    where = escape_unprintable(str(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(render_plan_page(report, shown), encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(f"cannot write {where}: {error.strerror}") from error
    click.echo(f"wrote {where}", err=True)
