"""`rlx check`: checks that a run's stored rollouts and probes are consistent."""

from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import json_option, registry_option
from rlx.cli.output import print_json, print_text
from rlx.launch import locate_run_folder, open_registry
from rlx.results import select_rollout_steps
from rlx.text import escape_unprintable

if TYPE_CHECKING:
    from rlx.results import AuditReport, IdentityTally, Violation

__all__ = ["check"]


@click.command()
@click.argument("run", shell_complete=complete_run)
@click.option("--step", type=click.IntRange(min=1), help="Check only this step.")
@json_option
@registry_option
def check(run: str, step: int | None, as_json: bool, url: str) -> int:
    """Check that RUN's records are consistent: scores, masks, rewards, advantages, probes.

    The exit code is 0 when every identity holds, 1 when one is violated, and 3 when every identity
    that could be checked holds but a reward plugin is missing.
    """
    from rlx.cli.progress import open_progress
    from rlx.results import check_run, probe_bodies

    with open_registry(url) as registry:
        found = registry.run(run)
        locate_run_folder(found, "rollouts", "probes")
        steps = select_rollout_steps(registry, found, () if step is None else (step,))
        probes = probe_bodies(registry, found.id, step)
        done = count(1)
        with open_progress("checking", "steps and probes", len(steps) + len(probes)) as show:
            report = check_run(registry, found, steps, probes, show=lambda _: show(next(done)))
    if as_json:
        print_json(_build_check_json(report))
    else:
        _show_audit(report)
    if not report.holds:
        return 1
    return 3 if report.unchecked else 0


def _build_check_json(report: "AuditReport") -> dict[str, object]:
    return {
        "run": report.run,
        "steps": list(report.steps),
        "holds": report.holds,
        "identities": [{**asdict(t), "holds": not t.violated} for t in report.tallies],
        "unchecked": list(report.unchecked),
        "notes": list(report.notes),
    }


def _show_audit(report: "AuditReport") -> None:
    from rlx.cli.console import print_table

    rows = [
        (
            _get_tally_sign(t),
            t.name,
            _format_count(t.checked, t.unit.removesuffix("s")) if t.checked else "nothing to check",
            t.says,
        )
        for t in report.tallies
    ]
    print_text(f"{report.run}: {_format_count(len(report.steps), 'step')}")
    print_table("", "", "", "", rows=rows)
    lines = []
    for tally in (t for t in report.tallies if t.violated):
        lines.append(f"{tally.name}: violated in {_format_count(tally.violated, 'place')}")
        lines += [
            f"  {escape_unprintable(_describe_violation(violation))}" for violation in tally.first
        ]
    lines += [escape_unprintable(line) for line in (*report.unchecked, *report.notes)]
    lines.append("all identities hold" if report.holds else "this record is inconsistent")
    print_text("\n" + "\n".join(lines))


def _format_count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _get_tally_sign(tally: "IdentityTally") -> str:
    if tally.violated:
        return "✗"
    return "✓" if tally.checked else "–"


def _describe_violation(v: "Violation") -> str:
    """Describes where a value is wrong, with the stored and the expected value."""
    named = (
        ("step", v.step),
        ("tree", v.tree),
        ("row", v.row),
        ("turn", v.turn),
        ("token", v.token),
    )
    where = ", ".join(f"{name} {number}" for name, number in named if number is not None)
    return f"{where}: {v.what} is {v.stored}, expected {v.expected}"
