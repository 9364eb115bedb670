"""`rlx stop` and `rlx resume`: end a run between two steps, and continue one from a checkpoint."""

import click

from rlx.cli.options import complete_run, overrides_option, registry_option
from rlx.cli.output import print_text
from rlx.discovery import describe_plugin_changes, resolve_plugins
from rlx.errors import RlxError, SpecError
from rlx.home import tracking_url
from rlx.launch import (
    BROKEN_OFF,
    continue_run,
    is_abandoned,
    is_half_made,
    is_spec_of_run,
    locate_run_folder,
    open_registry,
    reconcile_job,
    require_same_data,
    require_same_past,
    run_queue,
    stop_run,
)
from rlx.plan import check_file, run_preflight_checks
from rlx.spec import ExperimentSpec
from rlx.spec.reading import label_refusal
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

RESUMABLE = ("failed", "stopped", "lost", "queued")


@click.command()
@click.argument("run", required=False, shell_complete=complete_run)
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
    `--set rollout.max_prompt_tokens='{on_longer: drop}'`.

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
    with open_registry(url) as reading:
        found = reconcile_job(reading, reading.run(run))
    if is_half_made(found) or found.directory is None:
        raise SpecError(f"{found.id} never began: {BROKEN_OFF}; submit its experiment again")
    if found.effective_status not in RESUMABLE and not is_abandoned(found):
        raise SpecError(_describe_resume_refusal(found))
    spec = _build_resumed_spec(found, overrides)
    require_same_data(found)
    for note in _list_plugin_notes(found):
        print_text(f"warning: {escape_unprintable(note)}", err=True)
    with open_registry(url, read_only=False) as registry:
        if not continue_run(registry, found, url, spec):
            raise RlxError(f"{found.id} has just changed: try again")
    print_text(found.id if quiet else f"✓ {found.id} resumed")
    if detach:
        return 0
    from rlx.cli.follow import follow_run

    return follow_run(found.id, url, quiet=quiet)


def _describe_resume_refusal(run: RunRecord) -> str:
    if run.status in ("submitted", "running"):
        where = "" if run.host is None else f" on {run.host}"
        return f"{run.id} still has a supervisor, process {run.pid}{where}: rlx stop {run.id}"
    return f"{run.id} is {run.effective_status}: nothing to resume"


def _list_plugin_notes(run: RunRecord) -> list[str]:
    """What has become of the run's plugins; what keeps them from working is the run's to say."""
    try:
        spec = ExperimentSpec.from_record(run.spec)
        plugins = resolve_plugins(spec)
    except (RlxError, ValueError):
        return []
    return list(dict.fromkeys(describe_plugin_changes(plugins.provenance, run.plugins)))


def _build_resumed_spec(run: RunRecord, overrides: tuple[str, ...]) -> ExperimentSpec | None:
    """Returns the run's experiment with the overrides; None without overrides.

    Raises:
        SpecError: the overrides would make it another experiment.
    """
    if not overrides:
        return None
    read, plugins = check_file(locate_run_folder(run).resolved_spec, overrides)
    if not is_spec_of_run(read.spec, run):
        raise SpecError(
            f"{run.id} would be another experiment: only `runner`, `tracking` and "
            "`rollout.max_prompt_tokens.on_longer` can change; "
            f"for the rest: rlx submit SPEC --from-checkpoint {run.id}@latest"
        )
    require_same_past(read.spec, run)
    run_preflight_checks(read, plugins)
    return read.spec


@click.command()
@click.argument("run", shell_complete=complete_run)
@registry_option
def stop(run: str, url: str) -> None:
    """Stop RUN between two steps, with a checkpoint; repeat the command to stop it immediately.

    Its records stay, and `rlx resume` continues from its newest checkpoint.
    """
    with open_registry(url) as reading:  # read-only: creates no registry
        run_id = reading.run(run).id
    with open_registry(url, read_only=False) as registry:
        stop_run(registry, run_id, report=print_text)
