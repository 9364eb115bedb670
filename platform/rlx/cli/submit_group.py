"""`rlx submit --seeds --grid`: submits a group of runs and runs it as devices become free."""

from collections.abc import Sequence
from pathlib import Path

from rlx.cli.console import open_console
from rlx.cli.group_view import GroupView
from rlx.cli.groups import GroupMember, check_group, read_group, record_group, require_group_name
from rlx.cli.mlflow_page import describe_mlflow_page
from rlx.cli.output import print_text
from rlx.cli.text import print_warnings
from rlx.errors import EnvironmentFault
from rlx.launch import (
    delay_interrupts,
    find_finished_runs,
    find_runs,
    open_launcher,
    open_registry,
    registry_url,
    run_queue,
    start_job,
)
from rlx_registry import Registry, RunRecord

__all__ = ["submit_many"]


def submit_many(
    spec: Path,
    overrides: Sequence[str],
    seeds: str | None,
    grid: Sequence[str],
    *,
    group: str | None,
    at_once: int | None,
    returns: bool,
    rehearse: bool,
) -> int:
    """Records the missing runs of a group, submits those that are jobs, shows all, and runs them.

    Args:
        spec: file of the experiment.
        overrides: overrides of every run.
        seeds: text for `parse_seeds`; None takes the experiment's own seed.
        grid: texts for `parse_grid`.
        group: name of the group; None builds one from the experiment's name and what varies.
        at_once: number of runs at a time; None asks the launcher. Jobs are submitted at once.
        returns: leave the runs to waiting workers.
        rehearse: as of `check_group`.

    Returns:
        0 if every run has finished, or was left to workers; else 1.

    Raises:
        SpecError: the options or the name of the group are invalid, or the name is taken.
        InvalidSpec: a member is invalid; nothing is recorded then.
    """
    if group is not None:
        require_group_name(group)
    members = read_group(spec, overrides, seeds, grid)
    url = registry_url(members[0].read)
    if not all(find_finished_runs(url, [(one.read, one.plugins) for one in members])):
        members, warnings = check_group(members, elsewhere=returns, rehearse=rehearse)
        print_warnings(warnings)
    with open_registry(url, read_only=False) as registry:
        name, runs = record_group(registry, members, group)
        print_text(f"group {name}")
        _submit_jobs(registry, runs, url)
        view = GroupView(registry, name, members, runs)
        ids = list(dict.fromkeys(run.id for run in runs))
        if not returns:
            _follow_runs(registry, url, at_once or _count_runs_at_once(members, runs), ids, view)
        open_console().print(view.build_table())
        if returns:
            return 0
        ended = find_runs(registry, ids)
    print_text(f"compare them:  rlx compare {name}")
    if mlflow := describe_mlflow_page(ended, [name]):
        print_text(f"in MLflow:     {mlflow}")
    return int([run.status for run in ended] != ["finished"] * len(ids))


def _submit_jobs(registry: Registry, runs: Sequence[RunRecord], url: str) -> None:
    """Submits the runs that are jobs and have none; a refusal is reported, and ends it."""
    for run in runs:
        try:
            with delay_interrupts():
                start_job(registry, run, url)
        except EnvironmentFault as fault:  # such as a limit on jobs
            print_text(f"{fault}; repeat the command to submit it and what follows it", err=True)
            return


def _count_runs_at_once(members: Sequence[GroupMember], runs: Sequence[RunRecord]) -> int:
    """The smallest number that the launcher of a run names that has not finished."""
    specs = {
        str((member.read.spec.runner, member.read.spec.sampler)): member.read.spec
        for member, run in zip(members, runs, strict=True)
        if run.status != "finished"
    }
    launchers = [open_launcher(spec.runner, spec.sampler) for spec in specs.values()]
    return min((launcher.count_runs_at_once() for launcher in launchers), default=1)


def _follow_runs(
    registry: Registry, url: str, at_once: int, ids: Sequence[str], view: GroupView
) -> None:
    """Runs what is missing, under a live table."""
    print_text("Ctrl-C leaves runs running; repeat the command to run what is missing", err=True)
    with view.follow() as look:
        run_queue(
            registry, url, at_once, once=True, only=set(ids), report=_print_problem, look=look
        )
        look()


def _print_problem(text: str, *, err: bool = False) -> None:
    """Prints why a run is skipped; the view shows which are taken."""
    if err:
        print_text(text, err=True)
