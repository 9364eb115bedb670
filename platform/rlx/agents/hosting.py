"""Builds what answers the turns of an experiment's rollouts."""

from typing import TYPE_CHECKING

from rlx.agents.programs import ProgramStarter
from rlx.phase_setup import PhaseSetup, build_environment_host
from rlx.reward import RewardPool
from rlx.rollout import RolloutHost

if TYPE_CHECKING:
    from rlx.serving import ServedPolicy


def build_rollout_host(
    setup: PhaseSetup, pool: RewardPool, policy: "ServedPolicy"
) -> RolloutHost | None:
    """The host that runs a phase's environment or agent; None if it has neither."""
    agent = setup.plan.agent
    if agent is None:
        return build_environment_host(setup, pool)
    from rlx.agents.sampling import AgentHost  # its endpoint brings transformers and FastAPI

    return AgentHost(agent, policy, pool.keep(ProgramStarter))
