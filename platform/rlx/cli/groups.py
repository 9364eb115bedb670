"""Groups of runs: their members from `--seeds` and `--grid`, checked and recorded together."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlx.discovery import ExperimentPlugins, list_plugin_records
from rlx.errors import SpecError
from rlx.launch import RUN_LIKE, submit_run
from rlx.plan import check_file, run_preflight_checks
from rlx.spec.reading import Diagnostic, InvalidSpec, LoadedSpec, build_refusal, parse_yaml_document
from rlx.text import escape_unprintable
from rlx_registry import Registry, RunRecord, find_changed_plugins

GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


GOES_ON = {"queued", "submitted", "running", "lost", "finished"}
"""Statuses of a run that a group reuses; a run with any other status is submitted again."""


MAX_GROUP_RUNS = 10_000
"""Maximum number of runs in a group."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One run of the group.

    Attributes:
        cell: the values that distinguish it from other members, by path.
    """

    cell: dict[str, Any]
    read: LoadedSpec
    plugins: ExperimentPlugins

    @property
    def digest(self) -> str:
        """Digest of its experiment."""
        return self.plugins.compute_digest(self.read.spec)

    def is_run(self, run: RunRecord) -> bool:
        """Whether a run is the member's: the same experiment, seed, name and plugins."""
        spec = self.read.spec
        same = (run.digest, run.seed, run.name) == (self.digest, spec.seed, spec.name)
        return same and not find_changed_plugins(
            list_plugin_records(spec, self.plugins), run.plugins
        )


def parse_seeds(text: str) -> list[int]:
    """Parses `0..4`, `0,3,7`, or a mixture.

    Raises:
        SpecError: the text is neither, or names more seeds than a group may have runs.
    """
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
    """Parses `path=a,b` into every combination of values, the last path changing fastest.

    Values are parsed like those of the experiment and `--set`; repeated values count once.

    Raises:
        InvalidSpec: the values cannot be parsed.
        SpecError: a path has no values, occurs twice, or is `name`; or there are more combinations
            than a group may have runs.
    """
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
    """Reads and checks the experiment of every member.

    Args:
        spec: file of the experiment.
        overrides: overrides of every run.
        seeds: text for `parse_seeds`; None takes the experiment's own seed.
        grid: texts for `parse_grid`.

    Raises:
        SpecError: the seeds or the grid are invalid.
        InvalidSpec: a member is invalid.
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
                members.append(GroupMember(own, *check_file(spec, (*overrides, *settings))))
            except InvalidSpec as error:
                faults += [d for d in error.diagnostics if d not in faults]
    if faults:
        raise build_refusal(faults, str(spec))
    return members


def check_group(
    members: Sequence[GroupMember], *, elsewhere: bool, rehearse: bool
) -> tuple[list[GroupMember], tuple[Diagnostic, ...]]:
    """Checks what members need of this machine, and rehearses them.

    Args:
        members: of one group.
        elsewhere: whether the runs may be taken by workers on other machines.
        rehearse: whether to make the rehearsals.

    Returns:
        The members, with the warnings of their rehearsals; and every warning once.

    Raises:
        EnvironmentFault: this machine lacks what a member needs.
        InvalidSpec: a rehearsal finds an error.
    """
    checked, warnings = list(members), dict[Diagnostic, None]()
    for member in members:
        warnings |= dict.fromkeys(
            run_preflight_checks(member.read, member.plugins, elsewhere=elsewhere)
        )
    if rehearse:
        from rlx.plan import run_rehearsal_checks  # imports torch

        experiments = [(member.read, member.plugins) for member in members]
        found = run_rehearsal_checks(experiments, elsewhere=elsewhere)
        checked = [
            replace(m, plugins=replace(m.plugins, warnings=m.plugins.warnings + more))
            for m, more in zip(members, found, strict=True)
        ]
    own = (warning for member in checked for warning in member.plugins.warnings)
    return checked, tuple(dict.fromkeys((*own, *warnings)))


def record_group(
    registry: Registry, members: Sequence[GroupMember], group: str | None, *, anyway: bool = False
) -> tuple[str, list[RunRecord]]:
    """Records the missing runs of a group in the queue.

    Args:
        registry: open for writing.
        members: of one group.
        group: name of the group; None builds one from the experiment's name and what varies.
        anyway: as of `submit_run`.

    Returns:
        The name, and each member's run: the newest that goes on or has finished, or a new one.

    Raises:
        SpecError: the name is invalid or taken.
    """
    if group is not None:
        require_group_name(group)
        _require_unused_name(registry, members, group)
    name = group or _build_group_name(registry, members)
    return name, _record_group_runs(registry, members, name, anyway=anyway)


def require_group_name(group: str) -> None:
    """Checks that a name is valid for a group.

    Raises:
        SpecError: the name is invalid, or could be mistaken for a run.
    """
    if not GROUP_NAME.fullmatch(group):
        raise SpecError(
            f"--group {escape_unprintable(group)}: write letters, digits, '.', '_' and '-', "
            "at most 80"
        )
    if RUN_LIKE.fullmatch(group):
        raise SpecError(f"--group {group}: a run could have this name; choose another name")


def _require_unused_name(registry: Registry, members: Sequence[GroupMember], group: str) -> None:
    """Rejects the name of an experiment: for `rlx compare`, a name must be unambiguous."""
    if group == members[0].read.spec.name or registry.runs(name=group):
        raise SpecError(f"--group {group}: an experiment has this name; choose another one")


def _build_group_name(registry: Registry, members: Sequence[GroupMember]) -> str:
    """Builds a name from the experiment and the last keys of what varies, as `rlcr-normalize`.

    The name stays the same when seeds or values are added. If another group or experiment has it,
    a number is appended.
    """
    paths = list(dict.fromkeys(path for member in members for path in member.cell))
    varied = [path.rpartition(".")[2] for path in paths if path != "seed"] or ["seeds"]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join([members[0].read.spec.name, *varied]))[:72]
    digests = {member.digest for member in members}
    for name in itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2))):
        own = all(run.digest in digests for run in registry.runs(group=name))
        if own and not registry.runs(name=name):
            return name
    raise AssertionError("numbers have no end")


def _record_group_runs(
    registry: Registry, members: Sequence[GroupMember], group: str, *, anyway: bool
) -> list[RunRecord]:
    """Returns the run of each member: the newest existing one, or a new one in the queue.

    Of two equal groups that are recorded at once, the second gets the runs of the first.
    """
    there = [run for run in registry.runs() if run.effective_status in GOES_ON]
    runs = []
    for member in members:
        run = next(filter(member.is_run, there), None)
        if run is None:
            run, _ = submit_run(
                registry, member.read, member.plugins, again=False, queue=True, anyway=anyway
            )
            there.insert(0, run)
        registry.join(run.id, group)
        runs.append(run)
    return runs
