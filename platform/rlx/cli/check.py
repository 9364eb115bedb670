"""`rlx check`: checks this machine, the records of a run, or that runs resume; repairs records."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rlx.cli.output import print_json, print_text
from rlx.cli.progress import open_progress
from rlx.cli.verb_group import json_option, overrides_option, registry_option
from rlx.errors import SpecError
from rlx.home import DEFAULT_REGISTRY
from rlx.launch import VICTIMS, open_registry
from rlx.text import escape_unprintable
from rlx_registry import ENDED

if TYPE_CHECKING:
    from rlx.results import AuditReport


@click.command()
@click.argument("targets", nargs=-1, metavar="[RUN|FILE]...")
@click.option("--step", type=click.IntRange(min=1), help="Check only this step of RUN.")
@click.option("--kills", type=click.IntRange(1), help="Kill this many runs of FILE, each once.")
@click.option("--at-once", default=1, type=click.IntRange(1), help="With --kills: runs at a time.")
@click.option("--seed", default=0, type=int, help="Seed of the times of the kills.")
@overrides_option()
@click.option("--repair", is_flag=True, help="Send trackers what they missed.")
@json_option
@registry_option
@click.pass_context
def check(
    context: click.Context,
    targets: tuple[str, ...],
    step: int | None,
    kills: int | None,
    at_once: int,
    seed: int,
    overrides: tuple[str, ...],
    repair: bool,
    as_json: bool,
    url: str,
) -> int:
    """Check this machine, the records of a RUN, or that runs of a FILE resume.

    Without a name: what this machine has and lacks, and how to fix it. The exit code is 0 when an
    experiment with the built-in defaults can run here, else 4.

    With a RUN: whether its records are consistent: files, scores, masks, rewards, advantages. The
    exit code is 0 when every identity holds, 1 when one is violated, and 3 when every identity that
    could be checked holds but a reward plugin is missing.

    With a FILE and --kills N: runs it uninterrupted, then with kills, and compares every number
    except times. Each run is killed once, at a time drawn uniformly over the duration of an
    uninterrupted run. The runs are in a new registry, or in that of --registry. The exit code is 1
    if a number differs or a run does not finish.

    With --repair: sends trackers the records that they missed of each RUN, or of every run that
    has ended; a missing store is created first. The exit code is 4 if one cannot be reached; the
    registry keeps all records until then.
    """
    if repair:
        if kills is not None:
            raise SpecError("--repair and --kills: choose one")
        return _repair_records(targets, url)
    if not targets:
        return _check_machine(as_json=as_json)
    if len(targets) > 1:
        raise SpecError("name one RUN or FILE; --repair takes several runs")
    if kills is None:
        return _check_records(targets[0], step, url, as_json=as_json)
    is_named = context.get_parameter_source("url") is ParameterSource.COMMANDLINE
    registry = url if is_named else None
    spec = Path(targets[0])
    return _check_resume(
        spec, registry, overrides=overrides, kills=kills, at_once=at_once, seed=seed
    )


def _check_machine(*, as_json: bool) -> int:
    from rlx.plan import inspect_machine

    parts = tuple(inspect_machine(os.environ.get("RLX_REGISTRY") or DEFAULT_REGISTRY))
    ready = not any(part.required and part.state == "broken" for part in parts)
    if as_json:
        print_json({"ready": ready, "findings": [asdict(part) for part in parts]})
    else:
        from rlx.cli.tables import print_table

        signs = {"ok": "✓", "broken": "✗", "absent": "–"}
        rows = [
            (signs[one.state], one.name, one.found + (f"\n→ {one.fix}" if one.fix else ""))
            for one in parts
        ]
        print_table("", "", "", rows=rows)
        ending = "experiments can run here" if ready else "experiments cannot run here: see ✗"
        print_text(f"\n{ending}")
    return 0 if ready else 4


def _check_records(ref: str, step: int | None, url: str, *, as_json: bool) -> int:
    from rlx.results import check_run

    with open_registry(url) as registry:
        found = registry.run(ref)
        with open_progress("checking", "steps and probes") as show:
            report = check_run(registry, found, step, show=show)
    if as_json:
        tallies = [{**asdict(tally), "holds": not tally.violated} for tally in report.tallies]
        rest = {"unchecked": list(report.unchecked), "notes": list(report.notes)}
        head = {"run": report.run, "steps": list(report.steps), "holds": report.holds}
        print_json({**head, "identities": tallies, **rest})
    else:
        _show_audit(report)
    if not report.holds:
        return 1
    return 3 if report.unchecked else 0


def _show_audit(report: "AuditReport") -> None:
    from rlx.cli.tables import print_table

    def count(number: int, what: str) -> str:
        return f"{number} {what}" + ("" if number == 1 else "s")

    rows = []
    for tally in report.tallies:
        sign, checked = "–", "nothing to check"
        if tally.checked:
            sign = "✗" if tally.violated else "✓"
            checked = count(tally.checked, tally.unit.removesuffix("s"))
        rows.append((sign, tally.name, checked, tally.says))
    print_text(f"{report.run}: {count(len(report.steps), 'step')}")
    print_table("", "", "", "", rows=rows)
    lines = []
    for tally in (t for t in report.tallies if t.violated):
        lines.append(f"{tally.name}: violated in {count(tally.violated, 'place')}")
        for one in tally.first:
            named = ("step", "tree", "row", "turn", "token")
            places = [f"{n} {at}" for n in named if (at := getattr(one, n)) is not None]
            lines.append(
                f"  {', '.join(places)}: {one.what} is {one.stored}, expected {one.expected}"
            )
    lines += [*report.unchecked, *report.notes]
    lines.append("all identities hold" if report.holds else "this record is inconsistent")
    print_text("\n".join(map(escape_unprintable, ["", *lines])))


def _check_resume(spec: Path, registry: str | None, **options: Any) -> int:
    from rlx.cli.console import open_console
    from rlx.cli.tables import build_table
    from rlx.launch import run_resume_trial

    home = Path(tempfile.mkdtemp(prefix="rlx-check-"))
    done = run_resume_trial(spec, home, registry=registry, report=print_text, **options)

    counts = Counter((one.work, one.victim) for one in done)
    victims = dict.fromkeys([*VICTIMS, *(victim for _, victim in counts)])
    rows = [
        (work, *(str(counts[work, victim] or "") for victim in victims))
        for work in sorted({work for work, _ in counts})
    ]
    open_console().print(build_table("killed during", *victims, rows=rows))
    wrong = [kill for kill in done if kill.found]
    print_text(
        f"{len(done) - len(wrong)} of {len(done)} killed runs have the same numbers as the "
        "uninterrupted run"
    )
    if wrong:
        print_text(f"the runs are in {home}")
    else:
        shutil.rmtree(home, ignore_errors=True)
    return int(bool(wrong))


def _repair_records(runs: Sequence[str], url: str) -> int:
    """Sends trackers what they lack; one that is unreachable holds up no other."""
    from rlx.record import TrackerUnavailableError, list_tracker_settings, open_senders

    with open_registry(url) as reading:  # read-only: creates no registry
        named = list({run.id: run for run in map(reading.run, runs)}.values())
    failures: dict[str, TrackerUnavailableError] = {}
    sent = 0
    with open_registry(url, read_only=False) as registry, open_progress("sending", "runs") as show:
        for run in named:
            if not list_tracker_settings(run):
                raise SpecError(
                    f"{run.id} has no tracker: its spec says `tracking.mlflow: null`, and no "
                    "`tracking.trackers`"
                )
        found = named or [r for r in reversed(registry.runs()) if r.effective_status in ENDED]
        senders = [(run, sender) for run in found for sender in open_senders(registry, run)]
        for number, (run, sender) in enumerate(senders):
            show(number, len(senders))
            if sender.tracker.label in failures:  # it is not asked again
                continue
            try:
                if named or sender.is_behind or not sender.has_run():
                    points = sender.catch_up()
                    plural = "" if points == 1 else "s"
                    print_text(f"{run.id}: {points} point{plural} sent to {sender.tracker.title}")
                    sent += 1
            except TrackerUnavailableError as error:
                failures[sender.tracker.label] = error
    if failures:
        raise next(iter(failures.values()))
    if not sent:
        print_text("trackers are up to date")
    return 0
