"""The rehearsal of an experiment: a trial of every phase, and what it shows.

`rlx plan` reports it in full. `rlx submit` makes it before it records a run, and refuses an
experiment in which it finds an error.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlx.discovery import ExperimentPlugins
from rlx.errors import EnvironmentFault, PluginError, RlxError
from rlx.phase_setup import build_setup
from rlx.plan.findings import check_trial
from rlx.plan.responses import PlanSpeech, load_plan_problems, load_speech
from rlx.plan.stopping_bias import find_stopping_bias
from rlx.plan.trial import PlanTrial, run_trial
from rlx.reward import RewardPool
from rlx.spec import ExperimentSpec, FaultKind, KeyPath, PhaseSpec
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    build_error,
    build_refusal,
    locate_diagnostic,
    relocate_phase_fault,
)

_SECTION = re.compile(r"(task|mask|estimator) plugin '|([a-z_]+(?:\.\w+)*): ")
"""The beginning of a message that names a section of the experiment."""
_HELP = "`rlx plan` shows what was rehearsed; `rlx submit --no-rehearsal` skips it"


@dataclass(frozen=True, eq=False, slots=True)
class PhaseTrial:
    """The trial of phases with the same settings."""

    phases: tuple[PhaseSpec, ...]
    trial: PlanTrial


@dataclass(frozen=True, eq=False, slots=True)
class ExperimentTrial:
    """The trials of an experiment.

    Attributes:
        speech: dialogue of the model.
        trials: of all phases; after a plugin that hangs, of those before it.
        findings: errors and warnings, each once, with their locations in the file.
        biases: warnings about estimators that are biased where the policy decides when to stop.
            They are no mistakes, so only `rlx plan` shows them.
    """

    speech: PlanSpeech
    trials: tuple[PhaseTrial, ...]
    findings: tuple[Diagnostic, ...]
    biases: tuple[Diagnostic, ...]


def run_rehearsal_checks(
    experiments: Sequence[tuple[LoadedSpec, ExperimentPlugins]], *, elsewhere: bool = False
) -> list[tuple[Diagnostic, ...]]:
    """Rehearses experiments before runs of them are recorded.

    Experiments that differ only in what a trial does not depend on, such as the seed or the
    learning rate, share one rehearsal.

    Args:
        experiments: each with its plugins.
        elsewhere: another machine may run them, so what this one lacks is only a warning.

    Returns:
        The warnings of each experiment.

    Raises:
        InvalidSpec: lists what keeps the first faulty experiment from learning anything; of the
            type of its first cause: spec, plugins or machine.
    """
    rehearsed: dict[tuple[str, ...], tuple[Diagnostic, ...]] = {}
    warnings = []
    for read, plugins in experiments:
        settings = _list_trial_settings(read.spec)
        if settings not in rehearsed:
            rehearsed[settings] = tuple(_list_warnings(read, plugins, elsewhere))
        warnings.append(rehearsed[settings])
    return warnings


def _list_warnings(
    read: LoadedSpec, plugins: ExperimentPlugins, elsewhere: bool
) -> list[Diagnostic]:
    """Returns the warnings of one rehearsal; raises `InvalidSpec` if it finds errors."""
    try:
        found = list(rehearse_experiment(read, plugins).findings)
    except InvalidSpec as error:
        found = list(error.diagnostics)
    if elsewhere:
        found = [replace(f, severity="warning") if f.kind == "machine" else f for f in found]
    errors = [f for f in found if f.severity == "error"]
    if errors:
        errors[-1] = replace(errors[-1], helps=(*errors[-1].helps, _HELP))
        raise build_refusal(errors, read.document.file)
    return found


def rehearse_experiment(read: LoadedSpec, plugins: ExperimentPlugins) -> ExperimentTrial:
    """Runs a trial of every phase with different settings, and checks each.

    Raises:
        InvalidSpec: no trial is possible: the tokenizer cannot write a text, a task, mask or
            estimator plugin raises, or no worker process starts.
    """
    spec = read.spec
    found: list[tuple[PhaseSpec, Diagnostic]] = []
    trials: list[PhaseTrial] = []
    phases = [spec.phases[0]]
    try:
        speech = load_speech(spec, plugins)
        with RewardPool(workers=1, memory_mb=spec.runner.reward_memory_mb) as pool:
            for phases in _group_equal_phases(spec):
                trial = _run_phase_trial(spec.resolve_phase_spec(phases[0]), speech, pool)
                trials.append(PhaseTrial(tuple(phases), trial))
                findings = list(check_trial(trial))
                found += [(phase, finding) for phase in phases for finding in findings]
                if trial.stuck_plugin:
                    break  # it would hang in the other phases too, one deadline each
    except RlxError as error:
        found += [(phase, _build_stop_fault(error)) for phase in phases]
        raise build_refusal(list(_locate_findings(read, found)), read.document.file) from error
    biases = [
        (phase, bias)
        for phase in spec.phases
        for bias in find_stopping_bias(spec.resolve_phase_spec(phase))
    ]
    return ExperimentTrial(
        speech,
        tuple(trials),
        findings=tuple(_locate_findings(read, found)),
        biases=tuple(_locate_findings(read, biases)),
    )


def _build_stop_fault(error: RlxError) -> Diagnostic:
    """Returns the fault that ends a rehearsal, at the section that its message names."""
    message = str(error).strip().splitlines()[0].removesuffix(".")
    named = _SECTION.match(message)
    path: KeyPath = tuple((named[1] or named[2]).split(".")) if named else ()
    kind: FaultKind = "value"
    if isinstance(error, PluginError | EnvironmentFault):
        kind = "plugin" if isinstance(error, PluginError) else "machine"
    is_section = bool(path) and path[0] in ExperimentSpec.model_fields
    return build_error(path if is_section else (), message, kind=kind)


def _locate_findings(
    read: LoadedSpec, found: Sequence[tuple[PhaseSpec, Diagnostic]]
) -> Iterator[Diagnostic]:
    """Deduplicates findings and locates them in the file: at the phase if it sets the value."""
    phases: dict[tuple[KeyPath, str], list[PhaseSpec]] = {}
    for phase, finding in found:
        phases.setdefault((finding.path, finding.message), []).append(phase)
    for finding in {(f.path, f.message): f for _, f in found}.values():
        those = phases[finding.path, finding.message]
        one = those[0]
        if all(phase.set for phase in those) and len(those) < len(read.spec.phases):
            at = ("phases", read.spec.phases.index(one))
            finding = relocate_phase_fault(finding, at, {"name": one.name, "set": one.set})
        yield locate_diagnostic(finding, read.document)


_PROMPTS = 3
_MANY_ROWS_PER_PROMPT = 128
"""With at least this many rows per prompt, a trial uses only two prompts."""
_UNUSED = {"name", "seed", "phases", "optimizer", "runner", "tracking"}
"""Sections that do not change what a trial finds."""


def _group_equal_phases(spec: ExperimentSpec) -> list[list[PhaseSpec]]:
    """Groups phases that share everything from rollouts to loss."""
    groups: dict[str, list[PhaseSpec]] = {}
    for phase in spec.phases:
        settings = spec.resolve_phase_spec(phase).model_dump_json(exclude=_UNUSED)
        groups.setdefault(settings, []).append(phase)
    return list(groups.values())


def _list_trial_settings(spec: ExperimentSpec) -> tuple[str, ...]:
    """Returns what the trials of an experiment depend on: experiments with equal settings, such as
    those of several seeds or learning rates, need only one rehearsal."""
    phases = (spec.resolve_phase_spec(phase) for phase in spec.phases)
    return tuple(dict.fromkeys(phase.model_dump_json(exclude=_UNUSED) for phase in phases))


def _run_phase_trial(spec: ExperimentSpec, speech: PlanSpeech, pool: RewardPool) -> PlanTrial:
    """Runs the trial of one phase on its first few problems, however many a step has.

    Args:
        spec: the experiment with the phase's settings.
        speech: the dialogue of its model.
        pool: runs rewards and environment.

    Raises:
        SpecError, PluginError, EnvironmentFault: as `load_plan_problems` and `run_trial`.
    """
    setup = build_setup(spec)
    wanted = _PROMPTS if setup.plan.rows_per_prompt < _MANY_ROWS_PER_PROMPT else _PROMPTS - 1
    problems = load_plan_problems(spec, setup.task, min(wanted, spec.rollout.prompts_per_step))
    return run_trial(setup, problems, speech, pool)
