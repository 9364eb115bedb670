"""Checks a run's records: rewards, masks and credit must follow from the stored rollouts. Each
figure is recomputed from the stored scores, mask and streams, so a wrong one is reported by its own
name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from rlx.discovery import (
    build_plugin,
    describe_plugin_changes,
    resolve_plugins,
)
from rlx.errors import RlxError
from rlx.home import RunFolder
from rlx.launch import locate_run_folder
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.progress import ShowProgress, ignore_progress
from rlx.record import StoredStep, TrainedRows, read_step
from rlx.results.rescoring import credit_stored_rows, flatten_stored_rows
from rlx.results.stored_steps import select_rollout_steps
from rlx.reward import NamedReward, Place, RewardEntry, RewardPool, RewardTable, rescore_rollouts
from rlx.rollout import RolloutTree
from rlx.spec import ExperimentSpec, MultiTurnRolloutSpec, RewardsSpec
from rlx.step import ScoredRows
from rlx_registry import BodyError, Registry, RunRecord, read_body

VIOLATIONS_KEPT = 3
"""Violations reported per identity; further ones are only counted."""
RTOL = 1e-6
"""Tolerance for sums, whose order of addition depends on threads, relative to the largest value."""
IDENTITIES = {
    "bodies": ("files are the recorded ones", "files"),
    "scores": ("stored scores match the plugins' for the stored text", "scores"),
    "masks": ("the mask matches the strategy's", "tokens"),
    "placement": ("rewards are where the placement puts them", "tokens"),
    "kl": ("KL matches the estimator's for the log-probabilities", "tokens"),
    "token_rewards": ("token rewards are placed rewards minus β·KL", "tokens"),
    "advantages": ("advantages match the estimator's", "tokens"),
    "returns": ("returns match the estimator's", "tokens"),
    "weights": ("weights match the loss's aggregation", "tokens"),
    "totals": ("row scores are sums of their rewards", "rows"),
}
"""What must hold, and what is counted, by name. Those of a step rely on those before them."""

Value = float | str | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A stored value that differs from the expected one.

    Attributes:
        row: row of the step's batch; None if the item was not trained on.
        turn: turn number, from 1; None if the figure belongs to no turn.
        token: position in the row, 0 for the prompt's first token; None if it belongs to no token.
        what: name of the figure, such as "advantages" or "reward accuracy".
    """

    step: int
    tree: int | None = None
    row: int | None = None
    turn: int | None = None
    token: int | None = None
    what: str
    stored: Value
    expected: Value


@dataclass
class IdentityTally:
    """What must hold, what was checked in which unit over all steps, and the first violations."""

    name: str
    says: str
    unit: str
    checked: int = 0
    violated: int = 0
    first: list[Violation] = field(default_factory=list)

    def add(self, checked: int, violations: Sequence[Violation] = (), violated: int = 0) -> None:
        """Adds checked items, with all violations, or with the first of `violated` ones."""
        self.checked += checked
        self.violated += max(violated, len(violations))
        self.first += violations[: VIOLATIONS_KEPT - len(self.first)]


@dataclass(frozen=True)
class AuditReport:
    """Result of checking a run: what must hold, what could not be checked and why, and other
    remarks, such as a plugin that has changed since the run."""

    run: str
    steps: tuple[int, ...]
    tallies: tuple[IdentityTally, ...]
    unchecked: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not any(tally.violated for tally in self.tallies)


def check_run(
    registry: Registry,
    run: RunRecord,
    step: int | None = None,
    *,
    show: ShowProgress = ignore_progress,
) -> AuditReport:
    """Checks the stored steps of a run, or one, and that its files are the recorded ones.

    Raises:
        SpecError: the run has stored no rollouts, or not those of the step.
        PluginError: the task, the mask or the estimator of the run cannot be used here.
        RegistryError: the steps were recorded by another version of rlx.
    """
    steps = select_rollout_steps(registry, run, () if step is None else (step,))
    probes = sorted(  # schemes of the same probe share a file
        {
            (e.step, body["path"], body["sha256"])
            for e in registry.results.evaluations(run.id, "probe/")
            if (body := (e.payload or {}).get("body")) and step in (None, e.step)
        }
    )
    done, spec = count(1), ExperimentSpec.from_record(run.spec)
    tallies = {name: IdentityTally(name, *about) for name, about in IDENTITIES.items()}
    setups: dict[str, PhaseSetup] = {}
    unchecked, notes = dict[str, None](), dict[str, None]()  # each line once, in order

    def get_setup(phase: str) -> PhaseSetup:
        if phase not in setups:
            setups[phase], lost, remarks = _build_phase(spec, phase, run)
            unchecked.update(dict.fromkeys(lost))
            notes.update(dict.fromkeys(remarks))
        return setups[phase]

    runner, folder = spec.runner, locate_run_folder(run)
    with RewardPool(runner.reward_workers, runner.reward_memory_mb, folder.answers()) as pool:
        for number in steps:
            body = registry.results.rollout_body(run.id, number)
            table = _load_body(folder, number, body.path, body.sha256, tallies["bodies"])
            if table is not None:
                setup = get_setup(body.statistics["phase"])
                check_step(number, read_step(table), setup, body.statistics, pool, tallies)
            show(next(done), len(steps) + len(probes))
        for at, path, sha256 in probes:
            _load_body(folder, at, path, sha256, tallies["bodies"])
            show(next(done), len(steps) + len(probes))
    return AuditReport(
        run.id, tuple(steps), tuple(tallies.values()), tuple(unchecked), tuple(notes)
    )


def _load_body(
    folder: RunFolder, step: int, path: str, sha256: str, tally: IdentityTally
) -> pa.Table | None:
    try:
        table = read_body(folder.root / path, sha256)
    except BodyError as error:
        tally.add(1, [Violation(step=step, what=path, stored=str(error), expected=sha256)])
        return None
    tally.add(1)
    return table


def _build_phase(
    spec: ExperimentSpec, name: str, run: RunRecord
) -> tuple[PhaseSetup, list[str], list[str]]:
    """Builds a phase with the rewards that can be scored here; returns it, what is not checked for
    lack of the others, and what has become of the plugins."""
    phases = {phase.name: phase for phase in spec.phases}
    here, unchecked = _drop_unscorable_rewards(spec.resolve_phase_spec(phases[name]))
    plugins = resolve_plugins(here)
    notes = list(describe_plugin_changes(plugins.list_records(), run.plugins))
    if isinstance(here.rollout, MultiTurnRolloutSpec) and plugins.mask.reaches_beyond():
        notes.insert(
            0,
            f"phase {name!r}: mask {here.mask.plugin!r} covers more than the policy's own "
            "tokens, so training includes observations",
        )
    return build_setup(here), unchecked, notes


def _drop_unscorable_rewards(spec: ExperimentSpec) -> tuple[ExperimentSpec, list[str]]:
    lost: dict[str, str] = {}
    for name, use in [*spec.rewards.turn.items(), *spec.rewards.global_.items()]:
        try:
            build_plugin(use, "reward")
        except RlxError as error:
            why = str(error).splitlines()[0].removeprefix("error: ")
            lost[name] = f"scores of {name!r} were not checked: {why}"
    rewards = RewardsSpec(
        turn={name: use for name, use in spec.rewards.turn.items() if name not in lost},
        global_={name: use for name, use in spec.rewards.global_.items() if name not in lost},
    )
    return spec.model_copy(update={"rewards": rewards}), [*lost.values()]


def check_step(
    step: int,
    stored: StoredStep,
    setup: PhaseSetup,
    statistics: Mapping[str, Any],
    pool: RewardPool,
    tallies: Mapping[str, IdentityTally],
) -> None:
    """Checks one stored step, whose phase has the `setup`, and adds what it finds to the tallies;
    `statistics` are those of `credit_stored_rows`."""
    stored_rows, mask = stored.rows, stored.rows.tokens["mask"]
    scored = flatten_stored_rows(stored, setup, stored.rewards, mask=mask)
    if scored is None or mask is None:
        raise ValueError(f"step {step} has no trained rows")
    row_of = {
        (row.tree, turn): number
        for number, row in enumerate(scored.batch.rows)
        for turn in row.turns
    }
    wrong = []
    places, differing = _rescore(stored.trees, stored.rewards, setup.rewards, pool)
    for (t, s), what, held, new in differing:
        turn = stored.trees[t].segments[s].turn
        row = row_of.get((t, s))
        wrong.append(
            Violation(step=step, tree=t, row=row, turn=turn, what=what, stored=held, expected=new)
        )
    tallies["scores"].add(places, wrong)
    tokens = int(stored_rows.own.sum())
    expected = setup.mask(scored.batch)
    _compare(tallies["masks"], step, scored, "mask", (mask, expected), tokens, exact=True)
    train, _ = credit_stored_rows(step, stored, scored, setup, statistics)
    recomputed, learning = TrainedRows.from_batch(train), int(mask.sum())
    # Bit for bit where no sum depends on threads and no exponential on the CPU.
    plain_kl = setup.spec.credit.kl_penalty not in ("k3", "low_var_kl")
    exact = {"placed": True, "weights": True, "kl": plain_kl, "token_rewards": plain_kl}
    for name in ("placed", "kl", "token_rewards", "advantages", "returns", "weights"):
        tally = tallies["placement" if name == "placed" else name]
        then, now = stored_rows.tokens[name], recomputed.tokens[name]
        if then is not None and now is not None:
            is_exact = exact.get(name, False)
            _compare(tally, step, scored, name, (then, now), learning, exact=is_exact)
        elif then is not now:
            sides = ("none", "one") if then is None else ("one", "none")
            tally.add(0, [Violation(step=step, what=name, stored=sides[0], expected=sides[1])])
    totals = tallies["totals"]
    for name, now in vars(train.scores).items():
        if (then := stored_rows.scores.get(name)) is not None:
            _compare(totals, step, scored, name, (then, now), 0, exact=False)
    totals.checked += len(stored_rows.places)


def _compare(
    tally: IdentityTally,
    step: int,
    scored: ScoredRows,
    what: str,
    values: tuple[Tensor, Tensor],
    checked: int,
    *,
    exact: bool,
) -> None:
    """Compares stored and expected values, of tokens (`[B, T]`) or of rows (`[B]`): bit for bit, or
    up to the float32 rounding of a different order of addition."""
    stored, expected = values
    same = (stored == expected) | (stored.isnan() & expected.isnan())
    if not exact:
        scale = torch.where(expected.isfinite(), expected, 0.0).abs()
        slack = RTOL * scale.max() if scale.numel() else 0.0
        same |= (stored - expected).abs() <= slack
    batch, first = scored.batch, []
    for place in (~same).nonzero()[:VIOLATIONS_KEPT].tolist():
        row, token = place[0], place[1] if len(place) > 1 else None
        turn = int(batch.turn_ids[row, token]) if token is not None else 0
        first.append(
            Violation(
                step=step,
                tree=batch.rows[row].tree,
                row=row,
                turn=turn if turn > 0 else None,
                token=token,
                what=what,
                stored=stored[*place].item(),
                expected=expected[*place].item(),
            )
        )
    tally.add(checked, first, int((~same).sum()))


Scores = dict[tuple[str, Place, str], RewardEntry]
"""By scope, place and name."""
Difference = tuple[Place, str, Value, Value]
"""Place of a score, the name of what differs, its stored and its expected value."""


def _rescore(
    trees: Sequence[RolloutTree],
    stored: RewardTable,
    rewards: Sequence[NamedReward],
    pool: RewardPool,
) -> tuple[int, list[Difference]]:
    """Compares stored scores with new ones; returns how many were compared, and what differs.
    Rewards read by other rewards are taken as stored; scores of failed scorers are skipped."""
    known = {reward.name for reward in rewards}
    then: Scores = {
        (scope, place, name): entry
        for scope, table in (("turn", stored.turns), ("global", stored.rollouts))
        for place, entries in table.items()
        for name, entry in entries.items()
        if name in known
    }
    now: Scores = {
        (reward.scope, place, reward.name): entry
        for reward, place, entry in rescore_rollouts(trees, rewards, stored, pool)
    }
    checked = 0
    differing: list[Difference] = []
    for key in dict.fromkeys([*now, *then]):
        held = then.get(key)
        if held is None or not held.is_fault:
            checked += 1
            _, place, name = key
            differing += [(place, *one) for one in _compare_entries(name, held, now.get(key))]
    return checked, differing


def _compare_entries(
    name: str, then: RewardEntry | None, now: RewardEntry | None
) -> Iterable[tuple[str, Value, Value]]:
    """Name, stored and expected value of what differs; reasons may differ between versions of a
    plugin."""
    if then is None or now is None or (then.raw, then.status) != (now.raw, now.status):
        yield f"reward {name}", _describe_entry(then), _describe_entry(now)
    elif dict(then.parts) != dict(now.parts):
        yield f"parts of {name}", str(dict(then.parts)), str(dict(now.parts))
    elif then.weight != now.weight:
        yield f"weight of {name}", then.weight, now.weight


def _describe_entry(entry: RewardEntry | None) -> Value:
    if entry is None:
        return "nothing"
    if entry.raw is not None:
        return entry.raw
    return f"absent: {entry.reason}" if entry.reason else "absent"
