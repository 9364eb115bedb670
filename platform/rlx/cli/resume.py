"""`rlx stop` and `rlx resume`: end a run between two steps, and continue one from a checkpoint."""

import click

from rlx.cli.output import print_text
from rlx.cli.verb_group import overrides_option, registry_option
from rlx.home import tracking_url
from rlx.launch import open_registry, stop_run
from rlx.spec.reading import label_refusal


@click.command()
@click.argument("run")
@registry_option
@overrides_option("PATH=VALUE", "Override a value that `rlx resume` may change; can be repeated.")
@click.option("-d", "--detach", is_flag=True, help="Return once the run has started.")
@click.option("-q", "--quiet", is_flag=True, help="Print the run's id and nothing else.")
@label_refusal("resumed")
def resume(run: str, url: str, overrides: tuple[str, ...], detach: bool, quiet: bool) -> int:
    """Resume RUN, which failed, was stopped, is lost or queued, from its newest checkpoint.

    Without a checkpoint, RUN starts over and records the same results again. Settings that affect
    results cannot be changed; the number of ranks, their devices and their engine can.
    """
    url = tracking_url(url)
    from rlx.api import open_run

    found = open_run(run, registry=url).resume(*overrides, report=print_text)
    print_text(found.id if quiet else f"✓ {found.id} resumed")
    if detach:
        return 0
    from rlx.cli.follow import follow_run

    return follow_run(found.id, url, quiet=quiet)


@click.command()
@click.argument("run")
@registry_option
def stop(run: str, url: str) -> None:
    """Stop RUN between two steps, with a checkpoint; repeat the command to stop it immediately.

    Its records stay, and `rlx resume` continues from its newest checkpoint.
    """
    with open_registry(url) as reading:  # read-only: creates no registry
        run_id = reading.run(run).id
    with open_registry(url, read_only=False) as registry:
        stop_run(registry, run_id, report=print_text)
