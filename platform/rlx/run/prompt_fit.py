"""Which problems a run's policy can be shown."""

from rlx.model import Policy
from rlx.phase_setup import PhaseSetup
from rlx.rollout import PromptFit

__all__ = ["build_prompt_fit"]


def build_prompt_fit(policy: Policy, setup: PhaseSetup) -> PromptFit:
    """Which problems of a phase the policy can be shown."""
    rule = setup.spec.rollout.max_prompt_tokens
    return PromptFit(setup.plan, policy.dialogue, policy.context_length, rule)
