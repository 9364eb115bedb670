"""`rlx stop` and `rlx resume`: end a run between two steps, and continue one from a checkpoint."""

import click

from rlx.cli.output import print_text
from rlx.cli.verb_group import overrides_option, registry_option
from rlx.errors import SpecError
from rlx.home import tracking_url
from rlx.launch import open_registry, run_queue, stop_run
from rlx.spec.reading import label_refusal


@click.command()
@click.argument("run", required=False)
@registry_option
@overrides_option("PATH=VALUE", "Override a value that `rlx resume` may change; can be repeated.")
@click.option("-d", "--detach", is_flag=True, help="Return once the run has started.")
@click.option("-q", "--quiet", is_flag=True, help="Print the run's id and nothing else.")
@click.option("--queued", is_flag=True, help="Run queued runs, and take over lost ones.")
@click.option("--at-once", default=1, type=click.IntRange(1), help="With --queued: runs at a time.")
@click.option("--once", is_flag=True, help="With --queued: exit when nothing is left to do.")
@label_refusal("resumed")
def resume(
    run: str | None,
    url: str,
    overrides: tuple[str, ...],
    detach: bool,
    quiet: bool,
    queued: bool,
    at_once: int,
    once: bool,
) -> int:
    """Resume RUN, which failed, was stopped or is lost, from its newest checkpoint.

    Without a checkpoint, RUN starts over and records the same results again. Settings that affect
    results cannot be changed; the number of ranks, their devices and their engine can. A run that
    ended at a prompt that is too long goes on with
    `--set rollout.max_prompt_tokens={}`.

    With --queued, run what `rlx submit --queue` left, oldest first, and take over lost runs. Any
    number of such processes may share a registry, on any number of machines that share the run
    folders. Runs survive them, since each has its own supervisor.
    """
    url = tracking_url(url)
    if queued:
        if run is not None or overrides or detach or quiet:
            raise SpecError("--queued takes every run that waits: only --at-once and --once fit")
        with open_registry(url, read_only=False) as registry:
            run_queue(registry, url, at_once, once=once, report=print_text)
        return 0
    if run is None:
        raise SpecError("name the run, or use --queued for all that wait")
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
