"""Check a run's stored rollouts against the identities of credit assignment, and the samples of its
probes against its rewards.

The run is not modified. Rollouts use the plugins and options of their phase; probes use those of
the base experiment.

"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pyarrow as pa

from rlx.discovery import (
    build_plugin,
    describe_data_changes,
    describe_plugin_changes,
    resolve_plugins,
)
from rlx.errors import RlxError
from rlx.home import RunFolder, get_rlx_home
from rlx.launch import locate_run_folder
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.plugin import Estimator, Mask
from rlx.progress import ShowProgress, ignore_progress
from rlx.record import read_probe, read_step
from rlx.results.identities import (
    IDENTITIES,
    VIOLATIONS_KEPT,
    IdentityResult,
    StepEvidence,
    Violation,
    check_probe_scores,
)
from rlx.results.stored_steps import select_rollout_steps
from rlx.reward import RewardPool
from rlx.sealed_folder import CheckpointError, check_sealed_folder, compute_manifest_digest
from rlx.spec import ExperimentSpec, GlobalReward, MultiTurnRolloutSpec, RewardsSpec, TurnReward
from rlx_registry import BodyError, Registry, RunRecord, read_body

ProbeBody = tuple[int, str, str]
"""Step of a probe, and path and digest of the file with its samples."""


def _list_probe_bodies(registry: Registry, run_id: str, step: int | None) -> list[ProbeBody]:
    """Lists a run's probe files, of one step or of all. Schemes of the same probe share a file."""
    found = {
        (e.step, body["path"], body["sha256"])
        for e in registry.results.evaluations(run_id, "probe/")
        if (body := (e.payload or {}).get("body")) and step in (None, e.step)
    }
    return sorted(found)


@dataclass
class IdentityTally:
    """Results of one identity over all steps.

    Attributes:
        name: name of the identity.
        says: what must hold.
        unit: what `checked` counts.
        checked: number of items checked; 0 if the run has none.
        violated: number of violations.
        first: the first violations.
    """

    name: str
    says: str
    unit: str
    checked: int = 0
    violated: int = 0
    first: list[Violation] = field(default_factory=list)

    def add(self, found: IdentityResult) -> None:
        """Adds the result of one step."""
        self.checked += found.checked
        self.violated += found.violated
        self.first += found.first[: VIOLATIONS_KEPT - len(self.first)]


@dataclass(frozen=True)
class AuditReport:
    """Result of checking a run.

    Attributes:
        run: id of the run.
        steps: the steps checked.
        tallies: one per identity.
        unchecked: what could not be checked, and why.
        notes: other remarks, such as a plugin that has changed since the run.
    """

    run: str
    steps: tuple[int, ...]
    tallies: tuple[IdentityTally, ...]
    unchecked: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether there are no violations."""
        return not any(tally.violated for tally in self.tallies)


@dataclass(frozen=True)
class _AuditedPhase:
    """Everything needed to recompute a phase's figures.

    `setup` contains only the rewards that can be scored on this machine.
    """

    setup: PhaseSetup
    strategy: Mask
    estimator: Estimator
    unchecked: tuple[str, ...]
    notes: tuple[str, ...]


def check_run(
    registry: Registry,
    run: RunRecord,
    step: int | None = None,
    *,
    show: ShowProgress = ignore_progress,
) -> AuditReport:
    """Checks stored steps and probes of a run.

    Args:
        registry: registry that holds the run.
        run: a run with a folder.
        step: the only step to check; None checks all that are stored.
        show: called with the progress, in steps and probes.

    Raises:
        SpecError: the run has stored no rollouts, or not those of the step.
        PluginError: the task, the mask or the estimator of the run cannot be used here.
        RegistryError: the steps were recorded by another version of rlx.
    """
    steps = select_rollout_steps(registry, run, () if step is None else (step,))
    probes = _list_probe_bodies(registry, run.id, step)
    done, spec = count(1), ExperimentSpec.from_record(run.spec)
    warm = IdentityTally("warm_start", "the warm start is the one that was recorded", "folders")
    unread = [*_check_warm_start(registry, run, warm)]
    phases: dict[str | None, _AuditedPhase] = {}

    def get_phase(name: str | None) -> _AuditedPhase:
        if name not in phases:
            phases[name] = _build_phase(spec, name, run)
        return phases[name]

    bodies = IdentityTally("bodies", "files are the recorded ones", "files")
    probed = IdentityTally("probe_scores", "stored probe scores match the plugins'", "scores")
    tallies = {i.name: IdentityTally(i.name, i.says, i.unit) for i in IDENTITIES}
    runner, folder = spec.runner, locate_run_folder(run)
    with RewardPool(runner.reward_workers, runner.reward_memory_mb, folder.answers()) as pool:
        for number in steps:
            body = registry.results.rollout_body(run.id, number)
            table, found = _load_body_table(folder, number, body.path, body.sha256)
            bodies.add(found)
            if table is not None:
                phase = get_phase(body.statistics["phase"])
                evidence = StepEvidence(
                    step=number,
                    stored=read_step(table),
                    setup=phase.setup,
                    strategy=phase.strategy,
                    estimator=phase.estimator,
                    statistics=body.statistics,
                    pool=pool,
                )
                for identity in IDENTITIES:
                    tallies[identity.name].add(identity.check(evidence))
            show(next(done), len(steps) + len(probes))
        for at, path, sha256 in probes:
            table, found = _load_body_table(folder, at, path, sha256)
            bodies.add(found)
            if table is not None:
                setup = get_phase(None).setup
                probed.add(check_probe_scores(at, read_probe(table), setup, pool))
            show(next(done), len(steps) + len(probes))
    return AuditReport(
        run=run.id,
        steps=tuple(steps),
        tallies=(bodies, *tallies.values(), probed, *([warm] if warm.checked else [])),
        unchecked=_remove_duplicates(
            [*unread, *(line for phase in phases.values() for line in phase.unchecked)]
        ),
        notes=_remove_duplicates(line for phase in phases.values() for line in phase.notes),
    )


def _check_warm_start(registry: Registry, run: RunRecord, tally: IdentityTally) -> Iterator[str]:
    """Checks the warm starts that a run began with; yields why one cannot be checked."""
    events = [e.payload for e in registry.results.events(run.id) if e.kind == "warm_start"]
    for path, sha256 in dict.fromkeys((str(p["path"]), str(p["sha256"])) for p in events if p):
        folder = get_rlx_home() / path
        if not folder.exists():
            yield f"the warm start {path} is no longer in the cache"
            continue
        try:
            check_sealed_folder(folder)
            if compute_manifest_digest(folder) != sha256:
                yield f"the warm start {path} was rebuilt with other contents after the run"
            else:
                tally.add(IdentityResult(1))
        except CheckpointError as error:
            wrong = Violation(step=0, what=path, stored=str(error), expected=sha256)
            tally.add(IdentityResult(1, 1, (wrong,)))


def _load_body_table(
    folder: RunFolder, step: int, path: str, sha256: str
) -> tuple[pa.Table | None, IdentityResult]:
    try:
        return read_body(folder.root / path, sha256), IdentityResult(1)
    except BodyError as error:
        wrong = Violation(step=step, what=path, stored=str(error), expected=sha256)
        return None, IdentityResult(1, 1, (wrong,))


def _build_phase(spec: ExperimentSpec, name: str | None, run: RunRecord) -> _AuditedPhase:
    """Builds the phase called `name`; None stands for the base experiment."""
    phases = {phase.name: phase for phase in spec.phases}
    here, unchecked = _drop_unscorable_rewards(
        spec if name is None else spec.resolve_phase_spec(phases[name])
    )
    plugins = resolve_plugins(here)
    notes = (
        *_describe_mask_reach(here, plugins.mask, name),
        *describe_plugin_changes(plugins.provenance, run.plugins),
        *describe_data_changes(plugins.list_records(), run.plugins),
    )
    return _AuditedPhase(build_setup(here), plugins.mask, plugins.estimator, unchecked, notes)


def _drop_unscorable_rewards(spec: ExperimentSpec) -> tuple[ExperimentSpec, tuple[str, ...]]:
    """The spec without the rewards whose plugins cannot be used here, and a reason for each."""
    lost: dict[str, str] = {}
    uses: list[tuple[str, TurnReward | GlobalReward]] = [
        *spec.rewards.turn.items(),
        *spec.rewards.global_.items(),
    ]
    for name, use in uses:
        try:
            build_plugin(use, "reward")
        except RlxError as error:
            why = str(error).splitlines()[0].removeprefix("error: ")
            lost[name] = f"scores of {name!r} were not checked: {why}"
    rewards = RewardsSpec(
        turn={name: use for name, use in spec.rewards.turn.items() if name not in lost},
        global_={name: use for name, use in spec.rewards.global_.items() if name not in lost},
    )
    return spec.model_copy(update={"rewards": rewards}), tuple(lost.values())


def _describe_mask_reach(spec: ExperimentSpec, strategy: Mask, phase: str | None) -> Iterator[str]:
    """Yields a note if the mask trains on environment observations."""
    if (
        phase is not None
        and isinstance(spec.rollout, MultiTurnRolloutSpec)
        and strategy.reaches_beyond()
    ):
        yield (
            f"phase {phase!r}: mask {spec.mask.plugin!r} covers more than the policy's own "
            "tokens, so training includes observations"
        )


def _remove_duplicates(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lines))
