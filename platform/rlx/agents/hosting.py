"""Builds what answers the turns of an experiment's rollouts."""

from rlx.agents.sampling import AgentHost
from rlx.phase_setup import PhaseSetup, build_environment_host
from rlx.reward import RewardPool
from rlx.rollout import RolloutHost
from rlx.serving import ServedPolicy


def build_rollout_host(
    setup: PhaseSetup, pool: RewardPool, policy: ServedPolicy
) -> RolloutHost | None:
    """The host that runs a phase's environment or agent; None if it has neither.

    Args:
        setup: the phase.
        pool: workers that run environments.
        policy: the policy's tokenizer and dialogue format, for agents.
    """
    agent = setup.plan.agent
    return build_environment_host(setup, pool) if agent is None else AgentHost(agent, policy)
