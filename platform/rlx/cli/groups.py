"""Groups of runs: their members from `--seeds` and `--grid`, checked and recorded together."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.discovery import ExperimentPlugins, list_plugin_records
from rlx.errors import SpecError
from rlx.launch import RUN_LIKE, submit_run
from rlx.plan import check_file
from rlx.spec.reading import Diagnostic, InvalidSpec, LoadedSpec, build_refusal, parse_yaml_document
from rlx.text import escape_unprintable
from rlx_registry import Registry, RunRecord, find_changed_plugins

GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
GOES_ON = {"queued", "submitted", "running", "lost", "finished"}
"""Statuses of a run that a group reuses; a run with any other status is submitted again."""
MAX_GROUP_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One run of the group; `cell` has the values that distinguish it from others, by path."""

    cell: dict[str, Any]
    experiment: tuple[LoadedSpec, ExperimentPlugins]

    @property
    def digest(self) -> str:
        read, plugins = self.experiment
        return plugins.compute_digest(read.spec)

    def is_run(self, run: RunRecord) -> bool:
        """Whether a run is the member's: the same experiment, seed, name and plugins."""
        read, plugins = self.experiment
        same = (run.digest, run.seed, run.name) == (self.digest, read.spec.seed, read.spec.name)
        return same and not find_changed_plugins(
            list_plugin_records(read.spec, plugins), run.plugins
        )


def parse_seeds(text: str) -> list[int]:
    """Parses `0..4`, `0,3,7`, or a mixture."""
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part)
        if ends is None or (ends[2] is not None and int(ends[2]) < int(ends[1])):
            raise SpecError(f"--seeds {escape_unprintable(text)}: write 0..4, or 0,3,7")
        span = range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        _require_few(len(found) + len(span))
        found += span
    return list(dict.fromkeys(found))


def parse_grid(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Parses `path=a,b` into every combination of values, which are read as YAML; the last path
    changes fastest, and repeated values count once."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        found = parse_yaml_document(f"[{values}]", f"--grid {path}").tree if equals else None
        if not path or not found or path in axes:
            raise SpecError(f"--grid {escape_unprintable(text)}: write path=a,b, each path once")
        if path == "name":
            raise SpecError(
                "--grid name: a name does not change the experiment; use --group to name the group"
            )
        axes[path] = list({json.dumps(value): value for value in found}.values())
    _require_few(math.prod(map(len, axes.values())))
    return [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]


def _require_few(runs: int) -> None:
    if runs > MAX_GROUP_RUNS:
        raise SpecError(
            f"--seeds and --grid ask for {runs} runs: a group has at most {MAX_GROUP_RUNS}"
        )


def read_run_group(
    spec: Path, overrides: Sequence[str], seeds: str | None, grid: Sequence[str]
) -> list[GroupMember]:
    """Reads and checks the experiment of every member: of one without seeds and grid.

    Raises:
        SpecError: the seeds or the grid are invalid.
        InvalidSpec: a member is invalid; it has the faults of all members.
    """
    faults: list[Diagnostic] = []
    members: list[GroupMember] = []
    every = [{"seed": seed} for seed in parse_seeds(seeds)] if seeds is not None else [{}]
    cells = parse_grid(grid)
    if seeds is not None and "seed" in cells[0]:
        raise SpecError("--seeds and --grid seed=... both set the seed: use one of them")
    _require_few(len(cells) * len(every))
    for cell in cells:
        for seed in every:
            own: dict[str, Any] = {**cell, **seed}
            settings = [f"{p}={json.dumps(value, ensure_ascii=False)}" for p, value in own.items()]
            try:
                members.append(GroupMember(own, check_file(spec, (*overrides, *settings))))
            except InvalidSpec as error:
                if not own:
                    raise
                faults += [d for d in error.diagnostics if d not in faults]
    if faults:
        raise build_refusal(faults, str(spec))
    return members


def record_group(
    registry: Registry, members: Sequence[GroupMember], group: str | None, *, anyway: bool = False
) -> tuple[str, list[RunRecord]]:
    """Records the missing runs of a group in the queue; returns the group's name, by default of the
    experiment's and what varies, and each member's run: the newest that goes on or has finished, or
    a new one.

    Raises:
        SpecError: an experiment has the name, and `rlx compare` takes names of both.
    """
    own_name = members[0].experiment[0].spec.name
    if group is not None and (group == own_name or registry.runs(name=group)):
        raise SpecError(f"--group {group}: an experiment has this name; choose another one")
    name = group or _build_group_name(registry, members)
    there = [run for run in registry.runs() if run.effective_status in GOES_ON]
    runs = []
    for member in members:
        run = next(filter(member.is_run, there), None)
        if run is None:  # of two equal groups recorded at once, one gets the runs of the other
            run, _ = submit_run(
                registry, *member.experiment, again=False, queue=True, anyway=anyway
            )
            there.insert(0, run)
        registry.join(run.id, name)
        runs.append(run)
    return name, runs


def require_group_name(group: str) -> None:
    """Raises SpecError if a name is invalid for a group, or could be mistaken for a run."""
    if not GROUP_NAME.fullmatch(group):
        raise SpecError(
            f"--group {escape_unprintable(group)}: write letters, digits, '.', '_' and '-', "
            "at most 80"
        )
    if RUN_LIKE.fullmatch(group):
        raise SpecError(f"--group {group}: a run could have this name; choose another name")


def _build_group_name(registry: Registry, members: Sequence[GroupMember]) -> str:
    """The experiment's name and the last keys of what varies, such as `rlcr-normalize`, so that it
    stays when values are added; with a number if another group or experiment has it."""
    paths = list(dict.fromkeys(path for member in members for path in member.cell))
    varied = [path.rpartition(".")[2] for path in paths if path != "seed"] or ["seeds"]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join([members[0].experiment[0].spec.name, *varied]))[
        :72
    ]
    digests = {member.digest for member in members}
    for name in itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2))):
        own = all(run.digest in digests for run in registry.runs(group=name))
        if own and not registry.runs(name=name):
            return name
    raise AssertionError("numbers have no end")
