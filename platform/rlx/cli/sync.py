"""`rlx sync`: sends trackers, such as MLflow, what they missed."""

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import registry_option
from rlx.cli.output import print_text
from rlx.cli.progress import open_progress
from rlx.errors import SpecError
from rlx.launch import open_registry
from rlx_registry import ENDED


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@registry_option
def sync(runs: tuple[str, ...], url: str) -> None:
    """Send MLflow the records that it missed of each RUN, or of every run that has ended.

    A missing store is created first. The exit code is 4 if MLflow cannot be reached; the registry
    keeps all records until then.
    """
    from rlx.record import RunSender, TrackerUnavailableError, open_trackers

    with open_registry(url) as reading:  # read-only: creates no registry
        named = list({run.id: run for run in map(reading.run, runs)}.values())
    failures: dict[str, TrackerUnavailableError] = {}
    sent = 0
    with open_registry(url, read_only=False) as registry, open_progress("sending", "runs") as show:
        found = named or [r for r in reversed(registry.runs()) if r.effective_status in ENDED]
        pairs = [(run, tracker) for run in found for tracker in open_trackers(registry, run)]
        if named and not pairs:
            raise SpecError(f"{named[0].id} has no tracker: its spec says `tracking.mlflow: null`")
        for number, (run, tracker) in enumerate(pairs):
            show(number, len(pairs))
            if tracker.label in failures:  # it is not asked again
                continue
            sender = RunSender(registry, run.id, tracker)
            try:
                if named or sender.is_behind or not tracker.has_run(run):
                    points = sender.catch_up()
                    print_text(
                        f"{run.id}: {points} point{'' if points == 1 else 's'} sent to MLflow"
                    )
                    sent += 1
            except TrackerUnavailableError as error:
                failures[tracker.label] = error
    if failures:
        raise next(iter(failures.values()))
    if not sent:
        print_text("MLflow is up to date")
