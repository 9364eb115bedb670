"""What an experiment may say about the way from rewards to advantages, whatever the estimator."""

from typing import Any, Final, Literal

from pydantic import Field

from rlx.spec.base import StrictModel

__all__ = [
    "PROFILES",
    "AdaptiveBeta",
    "CreditSpec",
    "KlKind",
    "OnMissingTurn",
    "Placement",
    "Profile",
    "ScoreSource",
    "TurnReduce",
]

Placement = Literal["turn_proportional", "final_token_only", "turn_end"]
TurnReduce = Literal["sum", "mean"]
OnMissingTurn = Literal["drop", "to_last_token", "error"]
ScoreSource = Literal["structured", "token_rewards"]
KlKind = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]
Profile = Literal["rlx", "verl", "trl", "seed000", "seed004"]

PROFILES: Final[dict[Profile, dict[str, Any]]] = {
    "rlx": {},
    "verl": {"ddof": 1, "eps": 1e-6, "singleton": "raw", "environment": "skip", "whiten": True},
    "trl": {"ddof": 1, "eps": 1e-4, "singleton": "refuse"},
    "seed000": {
        "ddof": 1,
        "eps": 1e-6,
        "singleton": "raw",
        "environment": "literal",
        "whiten": True,
    },
    "seed004": {"ddof": 0, "eps": 1e-4, "singleton": "refuse"},
}
"""Options of the estimator that a profile stands for where the YAML does not give them. `rlx` is
every estimator's own defaults."""


class AdaptiveBeta(StrictModel):
    """Lets β follow the measured KL towards a target (Ziegler et al. 2019, section 2.2)."""

    target: float = Field(gt=0)
    """Nats per token."""
    horizon: float = Field(10_000.0, gt=0)
    """Rollouts; the larger, the slower β moves."""


class CreditSpec(StrictModel):
    """Where rewards are placed, whether KL is part of them, and what a row's one score is."""

    profile: Profile = "rlx"
    """Conventions of a source, by name: what the estimator's options are where not given."""
    placement: Placement | None = None
    """Which tokens get a turn's reward; null is the profile's. Only estimators that read token
    rewards, and `score_source: token_rewards`, see it."""
    turn_reduce: TurnReduce | None = None
    """Whether turn rewards are added or averaged when placed; null is the placement's own: mean
    for final_token_only, sum for the others, so they carry different mass."""
    on_missing_turn: OnMissingTurn = "drop"
    """What becomes of a turn's reward when no token of the turn learns."""
    score_source: ScoreSource = "structured"
    """A row's one score: mean(turn) + Σ global, or the sum of its token rewards, KL included."""
    use_kl_in_reward: bool = False
    """Every learning token pays β times its KL from the reference policy."""
    kl_penalty: KlKind = "kl"
    """How that KL is estimated; kl is k1."""
    kl_coef: float = Field(0.001, ge=0)
    """β, or where it begins."""
    kl_adaptive: AdaptiveBeta | None = None
    """null leaves β as it is."""

    @property
    def resolved_placement(self) -> Placement:
        """The placement that is meant where none is said."""
        if self.placement is not None:
            return self.placement
        if self.profile == "seed000" and self.use_kl_in_reward:
            return "turn_proportional"
        return "final_token_only"
