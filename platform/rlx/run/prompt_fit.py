"""Which problems a run's policy can be shown."""

from rlx.model import Policy
from rlx.recipe import Recipe
from rlx.rollout import PromptFit

__all__ = ["build_prompt_fit"]


def build_prompt_fit(policy: Policy, recipe: Recipe) -> PromptFit:
    """Which problems of a phase the policy can be shown."""
    rule = recipe.spec.rollout.max_prompt_tokens
    return PromptFit(recipe.plan, policy.dialogue, policy.context_length, rule)
