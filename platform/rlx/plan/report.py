"""The plan of an experiment: everything that is shown of it, as plain values.

`PlanReport.to_json` has the keys, which are stable:

    file, name, digest, seed, ok, exit_code
    notes      what stands in for what is not on this machine
    findings   [{severity, kind, message, path, line, helps, notes}]
    phases     [{names, steps, schedule, estimator, settings, made_up, stopped, shown,
                 rows       [{row, parent, tree, group, kind, level, problem, score, advantage,
                              gradient_weight, lost, finish_reason, turns, context, rewards,
                              tokens}]
                 groups, kinds, counts       as in `rlx.plan.statistics`
                 tokens                      as `rlx.plan.budget.TokenBudget`
                 memory                      as `rlx.plan.budget.Memory`, with its total, or null}]

A turn has number, kind, finish_reason and advantage. A token has position, token, text, author,
turn, learns, placed (by reward), kl, reward, advantage, weight, old_logprob, reference_logprob,
value and target.
`rows` are all that were made up; `shown` are the numbers of those that tables are printed of. Where
no credit could be given `stopped` says why and `rows` is empty.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rlx.discovery import Plugins, resolve
from rlx.plan.account import RowAccount, Rows, components
from rlx.plan.budget import Memory, TokenBudget, memory, token_budget
from rlx.plan.findings import findings
from rlx.plan.stand_ins import Speech, problems_of, speech_of
from rlx.plan.statistics import Counts, Group, Kind, counts_of, groups_of, kinds_of
from rlx.plan.trial import Trial, carry
from rlx.reward import RewardPool
from rlx.rollout import pieces_of
from rlx.run.parts import make_parts
from rlx.spec import ExperimentSpec, ManyTurn, PhaseSpec
from rlx.spec.diagnostic import Diagnostic, dotted
from rlx.spec.place import in_phase, locate
from rlx.spec.reader import ReadSpec

__all__ = ["PhaseReport", "PlanReport", "chosen", "make_plan", "plain"]

READINGS = {"scores": "scores", "turns": "named rewards", "token_rewards": "token rewards"}
PROMPTS = 3
MANY_ROWS = 128
"""From so many rows below a prompt on, two prompts do."""


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase, or several that are alike.

    Attributes:
        names: of the phases; `steps` of all of them together.
        schedule: its shape in words.
        estimator: its name.
        settings: what else decides credit, as (what, value).
        made_up: what no model gave.
        stopped: why there are no rows; "" where there are.
        rows: the account of every made-up row.
        shown: numbers of the rows to look at first: an answer that scored, one that failed, and
            confidences of both.
        memory: None where the model's dimensions are not known here.
    """

    names: tuple[str, ...]
    steps: int
    schedule: str
    estimator: str
    settings: tuple[tuple[str, str], ...]
    made_up: tuple[str, ...]
    stopped: str
    rows: tuple[RowAccount, ...]
    shown: tuple[int, ...]
    groups: tuple[Group, ...]
    kinds: tuple[Kind, ...]
    counts: Counts | None
    tokens: TokenBudget
    memory: Memory | None


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The whole plan."""

    file: str
    name: str
    digest: str
    seed: int
    notes: tuple[str, ...]
    findings: tuple[Diagnostic, ...]
    phases: tuple[PhaseReport, ...]

    @property
    def exit_code(self) -> int:
        """0, or that of the first cause there is: the spec before plugins before the machine."""
        return min((f.exit_code for f in self.findings if f.severity == "error"), default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values under the keys that this module's docstring names."""
        said = plain(self)
        told = [_told(f) for f in self.findings]
        code = self.exit_code
        for phase, made in zip(said["phases"], self.phases, strict=True):
            if made.memory is not None:
                phase["memory"]["total"] = made.memory.total
        return {"ok": code == 0, "exit_code": code, **said, "findings": told}


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON has them; numbers that are not finite as null."""
    if isinstance(value, RowAccount):
        more = {"advantage": value.advantage, "gradient_weight": value.gradient_weight}
        return {**_fields(value), **more}
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: plain(getattr(value, f.name)) for f in fields(value)}


def _told(finding: Diagnostic) -> dict[str, Any]:
    said = asdict(finding)
    line = None if finding.position is None else finding.position.line
    keys = ("severity", "kind", "message", "helps", "notes")
    return {**{k: plain(said[k]) for k in keys}, "path": dotted(finding.path), "line": line}


# Making it -------------------------------------------------------------------------------------


def make_plan(path: Path, read: ReadSpec, plugins: Plugins) -> PlanReport:
    """Carries made-up rollouts of every phase through the experiment's own code.

    Args:
        path: of the file, as its author named it.
        read: the experiment; it has been checked.
        plugins: its own, with the warnings of that check.

    Raises:
        SpecError, PluginError, EnvironmentFault: nothing at all can be shown.
    """
    spec = read.spec
    speech, note = speech_of(spec)
    notes = [note] if note else []
    found: list[tuple[PhaseSpec, Diagnostic]] = []
    phases = []
    with RewardPool(workers=1, memory_mb=spec.runner.reward_memory_mb) as pool:
        for alike in _alike(spec):
            parts = make_parts(spec.in_phase(alike[0]))
            problems = problems_of(parts.spec, parts.task, _prompts(parts.spec))
            notes += [problems.note] if problems.note and problems.note not in notes else []
            trial = carry(parts, problems, speech, pool)
            stand_ins = bool(problems.note)
            told = list(findings(trial, stand_ins=stand_ins))
            found += [(phase, finding) for phase in alike for finding in told]
            phases.append(_phase(alike, trial, speech))
            if trial.stuck:
                break  # it would in the other phases too, a deadline each
    said = [*plugins.warnings, *_placed(read, found)]
    return PlanReport(
        file=str(path),
        name=spec.name,
        digest=spec.digest,
        seed=spec.seed,
        notes=tuple(notes),
        findings=tuple(sorted(said, key=lambda f: f.severity == "warning")),
        phases=tuple(phases),
    )


def _alike(spec: ExperimentSpec) -> list[list[PhaseSpec]]:
    """Phases with the same way from rollouts to loss, together."""
    groups: dict[str, list[PhaseSpec]] = {}
    for phase in spec.phases:
        there = spec.in_phase(phase)
        decides = there.model_copy(update={"phases": (), "optimizer": spec.optimizer})
        groups.setdefault(decides.model_dump_json(), []).append(phase)
    return list(groups.values())


def _prompts(spec: ExperimentSpec) -> int:
    below = 1
    for key in spec.rollout.counts.values():
        below *= getattr(spec.rollout, key)
    wanted = PROMPTS if below < MANY_ROWS else PROMPTS - 1
    return min(wanted, spec.rollout.prompts_per_step)


def _placed(read: ReadSpec, found: Sequence[tuple[PhaseSpec, Diagnostic]]) -> Iterator[Diagnostic]:
    """Every finding once, at its place in the file: a phase's own at what the phase sets."""
    phases: dict[tuple[Any, str], list[PhaseSpec]] = {}
    for phase, finding in found:
        phases.setdefault((finding.path, finding.message), []).append(phase)
    for finding in {(f.path, f.message): f for _, f in found}.values():
        those = phases[finding.path, finding.message]
        one = those[0]
        if all(phase.set for phase in those) and len(those) < len(read.spec.phases):
            at = ("phases", read.spec.phases.index(one))
            finding = in_phase(finding, at, {"name": one.name, "set": one.set})
        yield locate(finding, read.document)


def _phase(alike: Sequence[PhaseSpec], trial: Trial, speech: Speech) -> PhaseReport:
    spec = trial.parts.spec
    rows = _accounts(trial, speech)
    tokens = token_budget(trial)
    shape = trial.shape
    return PhaseReport(
        names=tuple(phase.name for phase in alike),
        steps=sum(phase.steps for phase in alike),
        schedule=_schedule(trial),
        estimator=spec.estimator.plugin,
        settings=tuple(_settings(spec)),
        made_up=trial.made_up,
        stopped=trial.stopped,
        rows=rows,
        shown=chosen(rows, spec.evaluation.correct),
        groups=groups_of(rows),
        kinds=kinds_of(rows),
        counts=counts_of(trial) if rows else None,
        tokens=tokens,
        memory=None if shape is None else memory(trial, shape, tokens),
    )


def _accounts(trial: Trial, speech: Speech) -> tuple[RowAccount, ...]:
    train, rewards = trial.train, trial.rewards
    if train is None or rewards is None:
        return ()
    batch = train.batch
    rows = Rows(
        rows=batch.rows,
        groups=batch.group_ids,
        trees=trial.trees,
        table=trial.table,
        tokens={
            "mask": train.mask,
            "weights": train.weights,
            "advantages": train.advantages,
            "old_logprobs": train.streams.old_logprobs,
            "reference_logprobs": train.streams.reference_logprobs,
            "values": train.streams.values,
            "placed": train.placed.token_rewards,
            "token_rewards": train.token_rewards,
            "kl": train.kl,
            "returns": train.returns,
        },
        named=components(
            batch.rows,
            trial.trees,
            trial.table,
            rewards.turn_present,
            batch.turn_ids,
            train.mask,
            trial.parts.spec.credit,
        ),
        lost=train.placed.lost,
    )
    pieces = pieces_of(speech)
    return tuple(rows.account(number, pieces) for number in range(len(batch.rows)))


def chosen(rows: Sequence[RowAccount], correct: str) -> tuple[int, ...]:
    """An answer that scored and one that failed, and of both the confidences furthest apart.

    Args:
        rows: of a batch.
        correct: the reward that says, by 1, that an answer is correct. Of failures the one that
            scored highest is taken: it is wrong and otherwise in order.
    """
    first = [row for row in rows if row.level == 0]
    right = [row for row in first if _raw(row, correct) == 1.0]
    best = max(right or first, key=_merit, default=None)
    if best is None:
        return tuple(row.row for row in rows[:2])
    failed = [r for r in first if r not in right and r.tree == best.tree and r is not best]
    worst = max(failed, key=_merit, default=best)
    picked = []
    for row in dict.fromkeys((best.row, worst.row)):
        below = sorted((r for r in rows if r.parent == row), key=lambda r: r.advantage)
        picked += [row, *dict.fromkeys(r.row for r in (*below[-1:], *below[:1]))]
    return tuple(picked)


def _merit(row: RowAccount) -> float:
    return row.score if row.score is not None else 0.0


def _raw(row: RowAccount, name: str) -> float | None:
    return next((given.raw for given in row.rewards if given.name == name), None)


def _schedule(trial: Trial) -> str:
    spec, plan = trial.parts.spec.rollout, trial.parts.plan
    counts = " × ".join(f"{v.count} {v.kind}s" for v in plan.levels)
    if plan.talk is not None:
        counts = f"{plan.talk.count} rollouts of up to {plan.talk.max_turns} turns"
        counts += " and a forced answer" if plan.talk.forced_answer else ""
    return f"{spec.schedule}: {spec.prompts_per_step} prompts × {counts}"


def _settings(spec: ExperimentSpec) -> list[tuple[str, str]]:
    credit, loss = spec.credit, spec.loss
    estimator = resolve(spec).estimator
    rollout = spec.rollout
    there: list[tuple[str, Any]] = []
    if isinstance(rollout, ManyTurn):
        shown = "inline" if rollout.observation == "inline" else "as messages"
        there = [("environment", rollout.environment.plugin), ("observations", shown)]
    said: list[tuple[str, Any]] = [
        *there,
        ("it reads", READINGS[estimator.reading()]),
        ("profile", credit.profile),
        ("mask", spec.mask.plugin),
        ("placement", credit.resolved_placement),
        ("score", credit.score_source),
        ("KL in the reward", f"β {credit.kl_coef:g}" if credit.use_kl_in_reward else "no"),
        ("KL in the loss", f"{loss.kl.kl_penalty} × {loss.kl.coefficient:g}" if loss.kl else "no"),
        ("aggregate", loss.aggregate + (", per turn" if loss.per_turn else "")),
    ]
    return [(what, str(value)) for what, value in said]
