"""Has the model of an experiment answer some of its problems, before anything is submitted."""

from rlx.evaluation import FirstContact, describe_first_contact
from rlx.phase_setup import build_environment_host, build_setup
from rlx.results.models import load_model
from rlx.reward import score_rollouts
from rlx.rollout import sample_rollout_trees
from rlx.run import draw_contact_problems
from rlx.spec import ExperimentSpec


def try_model(spec: ExperimentSpec, prompts: int) -> FirstContact:
    """Samples and scores the first phase's rollouts of some training problems.

    The model is as it was trained elsewhere: a warm start is left out. Problems and seeds are those
    of the first contact of a run.

    Args:
        spec: the experiment, whose model is pretrained.
        prompts: number of problems.

    Raises:
        SpecError: the model is not pretrained, or does not fit the experiment.
        EnvironmentFault: model files or the device are missing.
    """
    setup = build_setup(spec.resolve_phase_spec(spec.phases[0]))
    with load_model(spec) as model:
        problems, seeds = draw_contact_problems(model.policy, setup, prompts)
        host, dialogue = build_environment_host(setup, model.pool), model.policy.dialogue
        with model.sampler.session() as session:
            trees = sample_rollout_trees(setup.plan, problems, seeds, session, dialogue, host)
        table = score_rollouts(trees, setup.rewards, model.pool)
        return describe_first_contact(setup, trees, table, dialogue.decode_tokens)
