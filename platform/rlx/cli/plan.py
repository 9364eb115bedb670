"""`rlx plan`: shows whether an experiment can learn, and what every token would get."""

import sys
from pathlib import Path

import click

from rlx.cli.output import print_json, print_report, print_text
from rlx.cli.verb_group import overrides_option
from rlx.importing import forbid_downloads
from rlx.plan import check_file, require_showable_texts
from rlx.spec.reading import count_errors, format_diagnostic
from rlx.text import escape_unprintable

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("spec", type=_FILE, metavar="SPEC")
@overrides_option("PATH.TO.KEY=VALUE")
@click.option("--full", is_flag=True, help="Show rows token by token, groups, tokens and memory.")
@click.option(
    "--try", "prompts", type=click.IntRange(1), metavar="N",
    help="Load the pretrained model, have it answer N problems, and time a step.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON document.")
def plan(
    spec: Path, overrides: tuple[str, ...], full: bool, prompts: int | None, as_json: bool
) -> int:
    """Preview whether an experiment can learn, and what. Loads no model, downloads nothing, unless
    --try asks the model itself.

    The verdict has three lines; --full adds the rewards, KL and advantages of every token of a few
    rows, and --json has all. Responses are synthetic; problems, tokens, rewards, loss mask, reward
    placement, estimator and weights are the experiment's own.
    """
    if prompts is None:
        forbid_downloads()
    read, plugins = check_file(spec, overrides)
    require_showable_texts(read, plugins)
    from rlx.plan import build_plan

    report = build_plan(spec, read, plugins)
    trial = None
    if prompts is not None and not report.exit_code:
        from rlx.results import try_model

        trial = try_model(read.spec, prompts)
    if as_json:
        tried = {} if trial is None else trial.to_json()
        print_json({**report.to_json(), **tried}, allow_nan=False)
        return report.exit_code

    from rlx.cli.console import open_console
    from rlx.plan import show_plan

    console = open_console()
    show_plan(report, console, full=full)
    if not full:
        console.print("--full shows every token, group and part of memory", style="dim")
    sys.stdout.flush()
    if trial is not None:
        print_text("\n".join(trial.list_lines()))
    for finding in report.findings:
        print_report("\n" + format_diagnostic(finding, str(spec)))
    if report.exit_code:
        closing = f"\n{escape_unprintable(str(spec))}: {count_errors(report.findings)}"
        print_text(closing, err=True)
    return report.exit_code
