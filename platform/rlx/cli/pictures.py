"""`rlx pictures`: draw plots of recorded runs."""

import os

import click

from rlx.cli.completion import complete_run
from rlx.cli.options import registry_option
from rlx.cli.output import print_text
from rlx.launch import locate_run_folder, open_registry, send_run_folder
from rlx.record import update_trackers
from rlx.text import escape_unprintable

__all__ = ["pictures"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_run)
@registry_option
def pictures(runs: tuple[str, ...], url: str) -> int:
    """Draw plots of each RUN into its folder: calibration, curves, distributions, probes.

    They show what is recorded so far, and replace earlier ones. The plots of a run that has ended
    are sent to MLflow too.
    """
    with open_registry(url) as reading:  # read-only: creates no registry
        found = [reading.run(run) for run in runs]
    from rlx.run import draw_run_pictures

    missing = False
    with open_registry(url, read_only=False) as registry:
        for run in found:
            drawn = draw_run_pictures(registry, run.id, locate_run_folder(run, "pictures"))
            send_run_folder(run)
            for path in drawn:
                print_text(escape_unprintable(os.path.relpath(path)))
            if not drawn:
                print_text(f"{run.id} has no records to draw yet", err=True)
                missing = True
            else:
                update_trackers(registry, registry.run(run.id))
    return int(missing)
