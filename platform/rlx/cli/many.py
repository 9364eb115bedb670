"""`rlx submit --seeds --grid`: one group of runs, shown first, then run as devices allow."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from rlx.cli.registry import open_registry
from rlx.cli.text import columns, warn
from rlx.cli.worker import work
from rlx.discovery import Plugins, check_file
from rlx.errors import SpecError
from rlx.run.launch import registry_url
from rlx.run.launch import submit as record
from rlx.run.preflight import preflight
from rlx.spec.diagnostic import Diagnostic, InvalidSpec, printable, refusal
from rlx.spec.launcher import Slurm
from rlx.spec.reader import ReadSpec
from rlx_registry import Registry, RunRecord

__all__ = ["grid_of", "seeds_of", "submit_many"]

GOES_ON = {"queued", "submitted", "running", "lost", "finished"}
"""States of a run that is the one that is asked for: others are run anew."""


@dataclass(frozen=True, slots=True)
class Member:
    """One run of the group.

    Attributes:
        cell: what sets it apart, by path.
    """

    cell: dict[str, Any]
    read: ReadSpec
    plugins: Plugins


def seeds_of(text: str) -> list[int]:
    """Reads `0..4`, `0,3,7`, or a mixture.

    Raises:
        SpecError: it is neither.
    """
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part)
        if ends is None or (ends[2] is not None and int(ends[2]) < int(ends[1])):
            raise SpecError(f"--seeds {printable(text)}: write 0..4, or 0,3,7")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return list(dict.fromkeys(found))


def grid_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Reads `path=a,b`, once per path: every combination, the last path changing fastest.

    Raises:
        SpecError: a path has no values, values that are not YAML, or is named twice.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        try:
            found = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError:
            found = None
        if not equals or not path or not found or path in axes:
            raise SpecError(f"--grid {printable(text)}: write path=a,b, each path once")
        axes[path] = found
    return [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]


def submit_many(
    spec: Path,
    overrides: Sequence[str],
    seeds: str | None,
    grid: Sequence[str],
    *,
    at_once: int,
    returns: bool,
) -> int:
    """Records what is missing of a group, shows all of it, and runs it.

    Args:
        spec: the experiment.
        overrides: for every run.
        seeds: as `seeds_of` reads them; None is the experiment's own.
        grid: as `grid_of` reads them.
        at_once: runs at once.
        returns: leave it to waiting workers.

    Returns:
        0 where every run has finished, or was left to workers; else 1.

    Raises:
        InvalidSpec: a member cannot be; nothing has been recorded then.
    """
    members = _members(spec, overrides, seeds, grid)
    url = registry_url(members[0].read)
    if isinstance(members[0].read.spec.runner.launcher, Slurm):
        raise SpecError("--seeds and --grid do not go with Slurm: submit its jobs one by one")
    told: dict[Diagnostic, None] = {}  # what members share is said once
    for member in members:
        told |= dict.fromkeys(member.plugins.warnings)
        told |= dict.fromkeys(preflight(member.read, member.plugins, elsewhere=returns))
    warn(tuple(told))
    with open_registry(url, read_only=False) as registry:
        runs = _recorded(registry, members)
        click.echo(_table(members, [registry.run(run.id) for run in runs]))
        ids = list(dict.fromkeys(run.id for run in runs))
        if returns:
            return 0
        click.echo(
            "Ctrl-C leaves what runs; the same command goes on with what is missing", err=True
        )
        work(registry, url, at_once, once=True, only=set(ids))
        ended = [registry.run(run) for run in ids]
        click.echo(_table(members, [registry.run(run.id) for run in runs]))
    click.echo(f"compare them:  rlx compare {' '.join(ids)}")
    return int(any(run.status != "finished" for run in ended))


def _members(
    spec: Path, overrides: Sequence[str], seeds: str | None, grid: Sequence[str]
) -> list[Member]:
    faults: list[Diagnostic] = []
    members: list[Member] = []
    every = [{"seed": seed} for seed in seeds_of(seeds)] if seeds is not None else [{}]
    for cell in grid_of(grid):
        for seed in every:
            own: dict[str, Any] = {**cell, **seed}
            said = [f"{path}={json.dumps(value)}" for path, value in own.items()]
            try:
                members.append(Member(own, *check_file(spec, (*overrides, *said))))
            except InvalidSpec as error:
                faults += [d for d in error.diagnostics if d not in faults]
    if faults:
        raise refusal(faults, str(spec))
    return members


def _recorded(registry: Registry, members: Sequence[Member]) -> list[RunRecord]:
    """Every member's run: the newest that is there, or a new one in the queue."""
    oldest_first = reversed(registry.runs())
    there = {(r.digest, r.seed): r for r in oldest_first if r.effective_status in GOES_ON}
    runs = []
    for member in members:
        which = member.read.spec.digest, member.read.spec.seed
        if which not in there:
            there[which] = record(registry, member.read, member.plugins, again=True, queue=True)[0]
        runs.append(there[which])
    return runs


def _table(members: Sequence[Member], runs: Sequence[RunRecord]) -> str:
    paths = list(dict.fromkeys(path for member in members for path in member.cell))
    rows = [
        (run.id, *(json.dumps(m.cell.get(p)) for p in paths), f"{run.step}", run.effective_status)
        for m, run in zip(members, runs, strict=True)
    ]
    return columns(rows, ("RUN", *paths, "STEP", "STATUS"))
