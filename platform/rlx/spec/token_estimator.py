"""Descriptors of the estimators that give credit along the tokens of a row; see `estimator.py`."""

from typing import ClassVar, Literal

from pydantic import Field

from rlx.plugin import Estimator, Reading

__all__ = [
    "EnvironmentTokens",
    "Gae",
    "OptimalTokenBaseline",
    "ReinforcePlusPlus",
    "TurnLevelGae",
    "VinePpo",
]

EnvironmentTokens = Literal["skip", "literal"]


class Gae(Estimator):
    """Generalized advantage estimation over a critic's values (PPO)."""

    implementation: ClassVar[str] = "rlx.credit:estimate_gae"
    reads: ClassVar[Reading] = "token_rewards"
    needs: ClassVar[frozenset[str]] = frozenset({"values"})

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ: 1 relies on sampled returns, 0 on the critic."""
    environment: EnvironmentTokens = "skip"
    """skip: environment tokens take no time step. literal: the literal recursion of KG-R1."""
    whiten: bool = False
    """Whiten advantages to mean 0 and variance 1 over the batch; the critic learns from raw
    returns."""


class TurnLevelGae(Estimator):
    """GAE from turn to turn, then from token to token within each turn."""

    implementation: ClassVar[str] = "rlx.credit:estimate_turn_level_gae"
    reads: ClassVar[Reading] = "token_rewards"
    needs: ClassVar[frozenset[str]] = frozenset({"values"})

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token within a turn."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ within a turn."""
    gamma_high: float = Field(1.0, ge=0, le=1)
    """Discount per turn."""
    lam_high: float = Field(1.0, ge=0, le=1)
    """λ from turn to turn."""
    whiten: bool = False
    """Whiten advantages to mean 0 and variance 1 over the batch; the critic learns from raw
    returns."""


class ReinforcePlusPlus(Estimator):
    """Discounted rewards-to-go, whitened over the batch."""

    implementation: ClassVar[str] = "rlx.credit:estimate_reinforce_plus_plus"
    reads: ClassVar[Reading] = "token_rewards"

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    whiten: bool = True
    """Whiten to mean 0 and variance 1 over the batch's tokens."""


class OptimalTokenBaseline(Estimator):
    """Rewards-to-go minus the group's mean at the same step, weighted by path variance."""

    implementation: ClassVar[str] = "rlx.credit:estimate_optimal_token_baseline"
    reads: ClassVar[Reading] = "token_rewards"
    needs: ClassVar[frozenset[str]] = frozenset({"collision_probs"})

    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a step that no other row of the group reaches: 0, or the raw return (verl)."""

    def compares(self, turn: str) -> bool:
        return self.singleton != "raw"


class VinePpo(Estimator):
    """Change in the Monte Carlo value estimate over each reasoning step."""

    implementation: ClassVar[str] = "rlx.credit:estimate_vineppo"
    needs: ClassVar[frozenset[str]] = frozenset({"mc_values"})
