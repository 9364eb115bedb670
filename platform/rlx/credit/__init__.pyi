from .group import (
    GroupAdvantageSettings,
    compute_group_extremes,
    group_advantages,
    has_score_spread,
)
from .inputs import Credit, CreditInputs, spread_over_mask, structured_scores, total_scores
from .outcome import (
    compute_gpg_advantages,
    compute_opo_advantages,
    compute_pass_at_k_advantages,
    compute_remax_advantages,
    compute_rloo_advantages,
)
from .place import (
    PlacedRewards,
    TurnWithoutTokens,
    place_rewards,
    sum_masked_returns,
    sum_token_rewards,
)
from .returns import (
    TokenAdvantages,
    compute_discounted_returns,
    compute_gae_advantages,
    compute_turn_gae_advantages,
    fill_between_ends,
    whiten_values,
)
from .second_level import ScaledAdvantages, ema_scale, prompt_scale
from .turns import (
    compute_gigpo_advantages,
    compute_mt_grpo_advantages,
    compute_multiturn_grpo_advantages,
    compute_tree_grpo_advantages,
)

__all__ = [
    "Credit",
    "CreditInputs",
    "GroupAdvantageSettings",
    "PlacedRewards",
    "ScaledAdvantages",
    "TokenAdvantages",
    "TurnWithoutTokens",
    "compute_discounted_returns",
    "compute_gae_advantages",
    "compute_gigpo_advantages",
    "compute_gpg_advantages",
    "compute_group_extremes",
    "compute_mt_grpo_advantages",
    "compute_multiturn_grpo_advantages",
    "compute_opo_advantages",
    "compute_pass_at_k_advantages",
    "compute_remax_advantages",
    "compute_rloo_advantages",
    "compute_tree_grpo_advantages",
    "compute_turn_gae_advantages",
    "ema_scale",
    "fill_between_ends",
    "group_advantages",
    "has_score_spread",
    "place_rewards",
    "prompt_scale",
    "spread_over_mask",
    "structured_scores",
    "sum_masked_returns",
    "sum_token_rewards",
    "total_scores",
    "whiten_values",
]
