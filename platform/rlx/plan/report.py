"""What a plan shows of an experiment, as plain values."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev, stdev
from typing import Any

from pydantic_core import to_json

from rlx.discovery import ExperimentPlugins, resolve_plugins
from rlx.model import ModelDialogue
from rlx.plan.memory import (
    DiskEstimate,
    MemoryEstimate,
    TokenBudget,
    compute_gpu_shares,
    estimate_disk,
    get_usable_share,
)
from rlx.plan.rehearsal_checks import rehearse_experiment
from rlx.plan.row_accounts import RowAccount, build_row_accounts, describe_row_kind
from rlx.plan.trial import PlanTrial
from rlx.spec.reading import Diagnostic, LoadedSpec
from rlx.text import pluralize_noun
from rlx_registry import STREAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Rows that are compared with each other.

    Attributes:
        tree: number of the prompt; `parent` is the row that the group continues, or None.
        kind: kind of the rows; "rollout" if they have several turns.
        std: standard deviation of the scores, by the estimator's `ddof`; None for a group of one.
        advantages: minimum and maximum over its learning tokens; it `has_signal` if one is not 0.
    """

    group: int
    tree: int
    parent: int | None
    kind: str
    rows: tuple[int, ...]
    scores: tuple[float, ...]
    mean: float
    std: float | None
    advantages: tuple[float, float]
    has_signal: bool


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase, or several phases with the same settings.

    Attributes:
        schedule: its shape, in words.
        tools: what the policy is told of each tool as JSON, a turn that calls it, and what it reads
            then; the last two are "" if no synthetic turn calls it.
        made_up: what is synthetic.
        stopped: why there are no rows; "" if there are rows.
        shown: numbers of the rows to look at first.
        memory: None if the model's dimensions are unknown on this machine.
        has_teacher: whether every token that learns is drawn to another model.
        gpus: `compute_gpu_shares`; up to `gpu_room` fits.
    """

    names: tuple[str, ...]
    steps: int
    schedule: str
    estimator: str
    tools: tuple[tuple[str, str, str], ...]
    made_up: tuple[str, ...]
    stopped: str
    rows: tuple[RowAccount, ...]
    shown: tuple[int, ...]
    groups: tuple[GroupStatistics, ...]
    tokens: TokenBudget
    memory: MemoryEstimate | None
    has_teacher: bool
    gpus: Mapping[str, float]
    gpu_room: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The plan of all phases; `notes` are placeholders for what is not on this machine, and `disk`
    is None if the model's dimensions are unknown here.
    """

    file: str
    name: str
    digest: str
    seed: int
    notes: tuple[str, ...]
    findings: tuple[Diagnostic, ...]
    disk: DiskEstimate | None
    phases: tuple[PhaseReport, ...]

    @property
    def exit_code(self) -> int:
        """0, or the exit code of the first cause found: spec, then plugins, then machine."""
        return min((f.exit_code for f in self.findings if f.severity == "error"), default=0)

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes, `ok`, `exit_code` and the memory's totals, by stable keys."""
        values = convert_to_json(self)
        for phase, made in zip(values["phases"], self.phases, strict=True):
            if made.memory is not None:
                phase["memory"] |= {
                    "total": made.memory.total,
                    "stage_totals": made.memory.stage_totals,
                }
        findings = [finding.to_json() for finding in self.findings]
        code = self.exit_code
        return {"ok": code == 0, "exit_code": code, **values, "findings": findings}


def convert_to_json(value: Any) -> Any:
    """Converts dataclasses to plain JSON values; non-finite numbers become null."""
    return json.loads(to_json(value, inf_nan_mode="null"))


def build_plan(path: Path, read: LoadedSpec, plugins: ExperimentPlugins) -> PlanReport:
    """Runs synthetic rollouts of every phase through the experiment's own code; raises InvalidSpec
    as `rehearse_experiment` does.

    Args:
        path: of the file, as its author named it.
        plugins: with the warnings of the validation.
    """
    rehearsal = rehearse_experiment(read, plugins)
    trials = rehearsal.trials
    notes = [rehearsal.speech.note, *(trial.note for trial in trials)]
    findings = [*plugins.warnings, *rehearsal.findings]
    return PlanReport(
        file=str(path),
        name=read.spec.name,
        digest=plugins.compute_digest(read.spec),
        seed=read.spec.seed,
        notes=tuple(dict.fromkeys(filter(None, notes))),
        findings=tuple(sorted(findings, key=lambda f: f.severity == "warning")),
        disk=None if trials[0].shape is None else estimate_disk(read.spec, trials[0].shape),
        phases=tuple(_build_phase_report(trial, rehearsal.speech.dialogue) for trial in trials),
    )


def _build_phase_report(trial: PlanTrial, dialogue: ModelDialogue) -> PhaseReport:
    spec, train = trial.setup.spec, trial.train
    rows: tuple[RowAccount, ...] = ()
    if train is not None and trial.rewards is not None:
        named = [stream.name for stream in STREAMS.values() if stream.shape == "[B, T]"]
        rows = build_row_accounts(
            train.batch,
            trial.trees,
            trial.table,
            spec.credit,
            dialogue,
            tokens={name: train.find_stream(name) for name in named},
            turn_present=trial.rewards.turn_present,
            groups=train.batch.group_ids,
            lost=train.lost,
        )
    memory = trial.memory
    return PhaseReport(
        names=tuple(phase.name for phase in trial.phases),
        steps=sum(phase.steps for phase in trial.phases),
        schedule=_describe_schedule(trial),
        estimator=spec.estimator.plugin,
        tools=tuple(_list_called_tools(trial)),
        made_up=trial.made_up,
        stopped=trial.stopped,
        rows=rows,
        shown=select_example_rows(rows, spec.evaluation.correct),
        groups=_list_groups(rows, resolve_plugins(spec).estimator.get_ddof),
        tokens=trial.tokens,
        memory=memory,
        has_teacher=spec.learns_from_teacher,
        gpus={} if memory is None else compute_gpu_shares(spec.runner, spec.sampler, memory),
        gpu_room=get_usable_share(spec.sampler),
    )


def select_example_rows(rows: Sequence[RowAccount], correct: str) -> tuple[int, ...]:
    """Picks a correct answer, a failed answer, what each continues, and the extreme confidences of
    both.

    Args:
        correct: name of the reward that is 1 for a correct answer. Of the failed answers the
            highest-scoring one is picked: it is wrong but otherwise well-formed.
    """
    raws = {row.row: [e.raw for e in row.rewards if e.name == correct] for row in rows}
    first = [row for row in rows if raws[row.row]] or [row for row in rows if row.level == 0]
    right = [row for row in first if raws[row.row][:1] == [1.0]]
    best = max(right or first, key=lambda row: row.score or 0.0, default=None)
    if best is None:
        return tuple(row.row for row in rows[:2])
    failed = [r for r in first if r not in right and r.tree == best.tree and r is not best]
    worst = max(failed, key=lambda row: row.score or 0.0, default=best)
    picked: list[int] = []
    for row in (best, worst):
        below = sorted((r for r in rows if r.parent == row.row), key=lambda r: r.advantage)
        picked += [r.row for r in rows if r.row == row.parent]
        picked += [row.row, *(r.row for r in (*below[-1:], *below[:1]))]
    return tuple(dict.fromkeys(picked))


def _list_groups(
    rows: Sequence[RowAccount], get_ddof: Callable[[str], int]
) -> tuple[GroupStatistics, ...]:
    """Returns the groups in order of their numbers; `get_ddof` is `Estimator.get_ddof`."""
    groups = []
    for number in sorted({row.group for row in rows}):
        own = [row for row in rows if row.group == number]
        kind = describe_row_kind(own)
        scores = tuple(row.score or 0.0 for row in own)
        deviation = stdev if get_ddof(kind) else pstdev
        learned = [t.advantage for row in own for t in row.tokens if t.learns] or [0.0]
        statistics = GroupStatistics(
            group=number,
            tree=own[0].tree,
            parent=own[0].parent,
            kind=kind,
            rows=tuple(row.row for row in own),
            scores=scores,
            mean=mean(scores),
            std=deviation(scores) if len(scores) > 1 else None,
            advantages=(min(learned), max(learned)),
            has_signal=any(learned),
        )
        groups.append(statistics)
    return tuple(groups)


def _describe_schedule(trial: PlanTrial) -> str:
    spec, plan = trial.setup.spec.rollout, trial.setup.plan
    counts = " × ".join(f"{v.count} {pluralize_noun(v.kind)}" for v in plan.levels)
    if plan.talk is not None:
        counts = f"{plan.talk.count} rollouts of up to {plan.talk.max_turns} turns"
        counts += " and a forced answer" if plan.talk.forced_answer else ""
        counts += " of each player" if plan.talk.players > 1 else ""
    return f"{spec.schedule}: {spec.prompts_per_step} prompts × {counts}"


def _list_called_tools(trial: PlanTrial) -> Iterator[tuple[str, str, str]]:
    talk = trial.setup.plan.talk
    for tool in talk.tools if talk is not None else ():
        called = (
            (tree.segments[answer.parent].text, answer.text)
            for tree in trial.trees
            for answer in tree.segments
            if answer.author == "environment"
            and tool["function"]["name"] in tree.segments[answer.parent].info.get("called", ())
        )
        yield (json.dumps(tool["function"], ensure_ascii=False), *next(called, ("", "")))
