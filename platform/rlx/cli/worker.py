"""`rlx worker`: runs queued runs and takes over lost ones."""

import click

from rlx.cli.options import registry_option
from rlx.cli.output import print_text
from rlx.home import tracking_url
from rlx.launch import open_registry, run_queue

__all__ = ["worker"]


@click.command()
@registry_option
@click.option(
    "--runs", "limit", default=1, type=click.IntRange(1), help="Number of runs at a time."
)
@click.option("--once", is_flag=True, help="Exit when nothing is left to do.")
def worker(url: str, limit: int, once: bool) -> None:
    """Run queued runs, oldest first, and take over lost runs.

    Any number of workers may share a registry, on any number of machines that share the run
    folders. Runs survive the end of their worker, since each has its own supervisor.
    """
    url = tracking_url(url)
    with open_registry(url, read_only=False) as registry:
        run_queue(registry, url, limit, once=once, report=print_text)
