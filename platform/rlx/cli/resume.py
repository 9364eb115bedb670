"""`rlx resume`: resumes a run from its newest checkpoint."""

import click

from rlx.cli.registry import locate_run_folder, open_registry, registry_option
from rlx.discovery import check_file
from rlx.errors import RlxError, SpecError
from rlx.home import tracking_url
from rlx.launch import continue_run, is_abandoned, reconcile_slurm_run, run_preflight_checks
from rlx.spec import ExperimentSpec
from rlx_registry import RunRecord

__all__ = ["resume"]

RESUMABLE = ("failed", "stopped", "lost", "queued")


@click.command()
@click.argument("run")
@registry_option
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Override a value of `runner` or `tracking`; can be repeated.",
)
@click.option("-d", "--detach", is_flag=True, help="Return once the run has started.")
@click.option("-q", "--quiet", is_flag=True, help="Print the run's id and nothing else.")
def resume(run: str, url: str, overrides: tuple[str, ...], detach: bool, quiet: bool) -> int:
    """Resume RUN, which failed, was stopped or is lost, from its newest checkpoint.

    Without a checkpoint, RUN starts over and records the same results again. Settings that affect
    results cannot be changed; the number of ranks, their devices and their engine can.
    """
    url = tracking_url(url)
    with open_registry(url) as reading:
        found = reconcile_slurm_run(reading, reading.run(run))
    if found.effective_status not in RESUMABLE and not is_abandoned(found):
        raise SpecError(_describe_resume_refusal(found))
    spec = _build_resumed_spec(found, overrides)
    with open_registry(url, read_only=False) as registry:
        if not continue_run(registry, found, url, spec):
            raise RlxError(f"{found.id} has changed just now: try again")
    click.echo(found.id if quiet else f"✓ {found.id} goes on")
    if detach:
        return 0
    from rlx.cli.follow import follow_run

    return follow_run(found.id, url, quiet=quiet)


def _describe_resume_refusal(run: RunRecord) -> str:
    if run.status in ("submitted", "running"):
        where = "" if run.host is None else f" on {run.host}"
        return f"{run.id} still has a supervisor, process {run.pid}{where}: rlx stop {run.id}"
    return f"{run.id} is {run.effective_status}: there is nothing to go on with"


def _build_resumed_spec(run: RunRecord, overrides: tuple[str, ...]) -> ExperimentSpec | None:
    """Returns the run's experiment with the overrides; None without overrides.

    Raises:
        SpecError: the overrides would make it another experiment.
    """
    if not overrides:
        return None
    read, plugins = check_file(locate_run_folder(run).resolved_spec, overrides)
    if (read.spec.digest, read.spec.seed) != (run.digest, run.seed):
        raise SpecError(
            f"{run.id} would be another experiment: only `runner` and `tracking` can change; "
            f"for the rest: rlx submit SPEC --from-checkpoint {run.id}@latest"
        )
    run_preflight_checks(read, plugins)
    return read.spec
