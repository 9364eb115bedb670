"""`rlx submit --seeds --grid`: submits a group of runs and runs it as devices become free."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlx.api import GroupMember, check_group, read_group, record_group, require_group_name
from rlx.cli.mlflow_page import describe_mlflow_page
from rlx.cli.output import print_text
from rlx.cli.text import format_columns, print_warnings
from rlx.launch import open_registry, registry_url, run_queue
from rlx_registry import RunRecord

__all__ = ["submit_many"]


def submit_many(
    spec: Path,
    overrides: Sequence[str],
    seeds: str | None,
    grid: Sequence[str],
    *,
    group: str | None,
    at_once: int,
    returns: bool,
    rehearse: bool,
) -> int:
    """Records the missing runs of a group, lists all of its runs, and runs them.

    Args:
        spec: file of the experiment.
        overrides: overrides of every run.
        seeds: text for `parse_seeds`; None takes the experiment's own seed.
        grid: texts for `parse_grid`.
        group: name of the group; None builds one from the experiment's name and what varies.
        at_once: number of runs at a time.
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
    members, warnings = check_group(members, elsewhere=returns, rehearse=rehearse)
    print_warnings(warnings)
    with open_registry(url, read_only=False) as registry:
        name, runs = record_group(registry, members, group)
        print_text(f"group {name}")
        print_text(_format_group_table(members, [registry.run(run.id) for run in runs]))
        ids = list(dict.fromkeys(run.id for run in runs))
        if returns:
            return 0
        print_text(
            "Ctrl-C leaves runs running; repeat the command to run what is missing", err=True
        )
        run_queue(registry, url, at_once, once=True, only=set(ids), report=print_text)
        ended = [registry.run(run) for run in ids]
        print_text(_format_group_table(members, [registry.run(run.id) for run in runs]))
    print_text(f"compare them:  rlx compare {name}")
    if mlflow := describe_mlflow_page(ended, [name]):
        print_text(f"in MLflow:     {mlflow}")
    return int(any(run.status != "finished" for run in ended))


def _format_group_table(members: Sequence[GroupMember], runs: Sequence[RunRecord]) -> str:
    paths = list(dict.fromkeys(path for member in members for path in member.cell))
    rows = [
        (run.id, *(json.dumps(m.cell.get(p)) for p in paths), f"{run.step}", run.effective_status)
        for m, run in zip(members, runs, strict=True)
    ]
    return format_columns(rows, ("RUN", *paths, "STEP", "STATUS"))
