"""Trials of an experiment's phases: one for all phases with the same settings."""

from rlx.recipe import build_recipe
from rlx.reward import RewardPool
from rlx.spec import ExperimentSpec, PhaseSpec
from rlx.trial.stand_ins import PlanSpeech, load_plan_problems
from rlx.trial.synthetic_rollouts import PlanTrial, run_trial

__all__ = ["group_equal_phases", "list_trial_settings", "run_phase_trial"]

PROMPTS = 3
MANY_ROWS = 128
"""With at least this many rows per prompt, a trial uses only two prompts."""
_UNUSED = {"name", "seed", "phases", "optimizer", "runner", "tracking"}
"""Sections that do not change what a trial finds."""


def group_equal_phases(spec: ExperimentSpec) -> list[list[PhaseSpec]]:
    """Groups phases that share everything from rollouts to loss."""
    groups: dict[str, list[PhaseSpec]] = {}
    for phase in spec.phases:
        settings = spec.resolve_phase_spec(phase).model_dump_json(exclude=_UNUSED)
        groups.setdefault(settings, []).append(phase)
    return list(groups.values())


def list_trial_settings(spec: ExperimentSpec) -> tuple[str, ...]:
    """Returns what the trials of an experiment depend on: experiments with equal settings, such as
    those of several seeds or learning rates, need only one rehearsal."""
    phases = (spec.resolve_phase_spec(phase) for phase in spec.phases)
    return tuple(dict.fromkeys(phase.model_dump_json(exclude=_UNUSED) for phase in phases))


def run_phase_trial(spec: ExperimentSpec, speech: PlanSpeech, pool: RewardPool) -> PlanTrial:
    """Runs the trial of one phase on its first few problems, however many a step has.

    Args:
        spec: the experiment with the phase's settings.
        speech: the dialogue of its model.
        pool: runs rewards and environment.

    Raises:
        SpecError, PluginError, EnvironmentFault: as `load_plan_problems` and `run_trial`.
    """
    recipe = build_recipe(spec)
    wanted = PROMPTS if recipe.plan.rows_per_prompt < MANY_ROWS else PROMPTS - 1
    problems = load_plan_problems(spec, recipe.task, min(wanted, spec.rollout.prompts_per_step))
    return run_trial(recipe, problems, speech, pool)
