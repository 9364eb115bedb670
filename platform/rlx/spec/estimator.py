"""The `credit:` section, and the options of the estimators that rlx ships (`rlx.estimators`).

The formulas, with sources and shapes, are in `rlx.credit`; `docs/estimators/` has a page for each.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    model_validator,
)

from rlx.plugin import Estimator, Reading, StrictModel
from rlx.spec.reward import PluginUse

Normalize = Literal["std", "center", "leave_one_out", "batch_std"]
Baseline = Literal["siblings", "prompt"]
Singleton = Literal["zero", "raw", "refuse"]
Alpha = Literal["scores", "groups"]


class ConfidenceSpec(StrictModel):
    """How confidences are compared with their siblings, the confidences of the same answer."""

    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1, 0 by n."""
    eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation."""
    singleton: Singleton = "zero"
    """Advantage in a group of one: 0, the raw score, or refused when the YAML is read."""
    tolerance: float = Field(0.0, ge=0)
    """A group whose scores differ by no more than this carries no signal."""
    normalize: Normalize = "center"
    """std divides by the standard deviation, center does not. leave_one_out subtracts the mean of
    the others. batch_std divides by the standard deviation of all confidences of the batch."""
    baseline: Literal["siblings", "prompt", "label"] = "siblings"
    """siblings: compare with the confidences of the same answer. prompt: with all of the prompt.
    label: with the mean over all other confidences of the step whose answer has the same label, for
    `loss.expected` with one confidence per answer."""

    @property
    def comparison(self) -> dict[str, Any]:
        """The options of `rlx.credit.group_advantages`."""
        return self.model_dump(exclude={"baseline"})


class _GroupEstimator(Estimator):
    """Compares a row with the others of its group; `rule` says how, where that is no option."""

    rule: ClassVar[Normalize] = "center"

    singleton: Singleton = "zero"
    """Advantage in a group of one: 0, the raw score, or refused when the YAML is read."""
    tolerance: float = Field(0.0, ge=0)
    """A group whose scores differ by no more than this carries no signal."""

    def compares(self, turn: str) -> bool:
        return self.singleton != "raw"

    def refuses_one(self, turn: str) -> bool:
        return self.singleton == "refuse"

    @property
    def comparison(self) -> dict[str, Any]:
        """Its settings of `rlx.credit.group_advantages`."""
        own = self.model_dump(include={"ddof", "eps", "singleton", "tolerance", "normalize"})
        return {"normalize": self.rule, **own}


class _NormalizingEstimator(_GroupEstimator):
    """A group estimator that divides by a standard deviation."""

    rule: ClassVar[Normalize] = "std"

    ddof: Literal[0, 1] = 1
    """1 divides the variance by n - 1, 0 by n."""
    eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation."""

    def get_ddof(self, turn: str) -> Literal[0, 1]:
        return self.ddof


class _AnyNormalization(_NormalizingEstimator):
    normalize: Normalize = "std"
    """std divides by the standard deviation of what is compared, center does not. leave_one_out
    subtracts the mean of the others. batch_std divides by the standard deviation of the whole
    batch."""


class Grpo(_AnyNormalization):
    """Score minus the group mean, divided by the group's standard deviation unless centered."""

    implementation: ClassVar[str] = "rlx.credit:estimate_grpo"

    baseline: Baseline = "siblings"
    """siblings: compare rows that continue the same turn. prompt: all rows of the prompt on the
    same level."""
    enable_multiturn_advantage: bool = False
    """Compare turns with turns and rollouts with rollouts, as `multiturn_grpo` does by default."""

    @model_validator(mode="after")
    def _check_normalize(self) -> Self:
        if self.enable_multiturn_advantage and self.normalize != "std":
            raise ValueError(
                f"enable_multiturn_advantage divides by σ; normalize cannot be {self.normalize}"
            )
        if self.enable_multiturn_advantage and self.baseline != "siblings":
            raise ValueError("enable_multiturn_advantage needs baseline: siblings")
        return self

    def compares(self, turn: str) -> bool:
        return super().compares(turn) and self.baseline == "siblings"

    def refuses_one(self, turn: str) -> bool:
        return super().refuses_one(turn) and self.baseline == "siblings"

    def reading(self) -> Reading:
        return "turns" if self.enable_multiturn_advantage else "scores"

    @property
    def multiturn(self) -> "MultiturnGrpo":
        """The estimator that `enable_multiturn_advantage` selects."""
        return MultiturnGrpo(**self.model_dump(include=set(MultiturnGrpo.model_fields)))


class Gdpo(_AnyNormalization):
    """Each named reward normalized on its own within its group, then their weighted sum."""

    implementation: ClassVar[str] = "rlx.credit:estimate_gdpo"
    reads: ClassVar[Reading] = "turns"

    renormalize: Literal["rows", "tokens", "none"] = "rows"
    """rows: normalize the sum over the rows of the batch, as published. tokens: whiten it over the
    batch's tokens (verl). none: leave it."""


class Uniform(_NormalizingEstimator):
    """Mean turn reward plus global rewards, group-normalized, the same on every token."""

    implementation: ClassVar[str] = "rlx.credit:estimate_uniform"
    reads: ClassVar[Reading] = "turns"


class DrGrpo(_GroupEstimator):
    """Score minus the group mean; with `loss.aggregate: constant` this is Dr. GRPO."""

    implementation: ClassVar[str] = "rlx.credit:estimate_dr_grpo"


class Rloo(_GroupEstimator):
    """Score minus the mean of the other scores in its group (leave-one-out)."""

    implementation: ClassVar[str] = "rlx.credit:estimate_rloo"
    rule: ClassVar[Normalize] = "leave_one_out"


class Opo(_GroupEstimator):
    """Score minus the length-weighted mean of its group."""

    implementation: ClassVar[str] = "rlx.credit:estimate_opo"


class Gpg(_GroupEstimator):
    """Score minus the group mean, scaled up to compensate for groups without signal."""

    implementation: ClassVar[str] = "rlx.credit:estimate_gpg"

    alpha: Alpha = "groups"
    """What counts as signal: groups whose scores differ (the paper), or nonzero scores (verl)."""
    f_norm: float = Field(1.0, gt=0)
    """Constant divisor."""


class MaxRl(_GroupEstimator):
    """Score minus the group mean, divided by that mean, so that rare successes weigh more."""

    implementation: ClassVar[str] = "rlx.credit:estimate_maxrl"

    eps: float = Field(1e-6, ge=0)
    """Added to the mean."""


class PassAtK(_NormalizingEstimator):
    """Only the best row of a group gets an advantage: its lead over the second best."""

    implementation: ClassVar[str] = "rlx.credit:estimate_pass_at_k"

    normalize: Literal["std", "center"] = "std"
    """std divides by the standard deviation, center does not."""

    def compares(self, turn: str) -> bool:
        return True


class Remax(Estimator):
    """Score minus the score of the greedy answer to the same prompt."""

    implementation: ClassVar[str] = "rlx.credit:estimate_remax"
    needs: ClassVar[frozenset[str]] = frozenset({"greedy_scores"})

    returns: Literal["score", "to_go"] = "score"
    """score: the row's score, on every token. to_go: the rewards placed on a token and all later
    ones (verl)."""

    def reading(self) -> Reading:
        return "scores" if self.returns == "score" else "token_rewards"


class MultiturnGrpo(_NormalizingEstimator):
    """Turns compared with turns of the prompt, plus rollouts with rollouts (KG-R1)."""

    implementation: ClassVar[str] = "rlx.credit:estimate_multiturn_grpo"
    reads: ClassVar[Reading] = "turns"

    statistics: Literal["pooled", "per_turn"] = "pooled"
    """One mean and standard deviation over all turns of a prompt, or one per turn number."""
    turn_weight: float = 0.5
    """Multiplies the turn advantages."""


class MtGrpo(_NormalizingEstimator):
    """The first turn learns from its own reward and the outcome, later turns from the outcome."""

    implementation: ClassVar[str] = "rlx.credit:estimate_mt_grpo"
    reads: ClassVar[Reading] = "turns"

    eps: float = Field(1e-4, ge=0)
    """Added to the standard deviation."""
    turn_coef: float = 1.0
    """Multiplies the advantage of the first turn."""


class Gigpo(_AnyNormalization):
    """Rollouts compared with rollouts of the prompt, plus turns with turns from the same state."""

    implementation: ClassVar[str] = "rlx.credit:estimate_gigpo"
    reads: ClassVar[Reading] = "turns"

    normalize: Normalize = "center"
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per turn."""
    omega: float = 1.0
    """Multiplies the turn advantages."""


class TreeGrpo(_AnyNormalization):
    """A leaf compared with all leaves of its prompt, plus with its siblings."""

    implementation: ClassVar[str] = "rlx.credit:estimate_tree_grpo"


class ReinforcePlusPlusBaseline(_GroupEstimator):
    """Score minus the group mean, whitened over the batch."""

    implementation: ClassVar[str] = "rlx.credit:estimate_reinforce_plus_plus_baseline"

    whiten: bool = True
    """Whiten to mean 0 and variance 1 over the batch's tokens."""


class TwoLevel(_AnyNormalization):
    """Answers compared within their prompt, confidences within their answer (RLCR in two turns)."""

    implementation: ClassVar[str] = "rlx.credit:estimate_two_level"

    baseline: Baseline = "siblings"
    """For answers: compare those that continue the same turn, or all of the prompt."""
    confidence: ConfidenceSpec = ConfidenceSpec.model_construct()
    """The same conventions for the confidences of one answer; centered only by default."""
    second_level: Literal["none", "prompt_scale", "prompt_renorm", "ema_scale"] = "none"
    """Rescaling of the confidence advantages: prompt_scale divides by one standard deviation per
    prompt, prompt_renorm normalizes again within the prompt, ema_scale divides by a running scale
    over the whole run."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the running scale."""
    lambda_ans: float = Field(1.0, ge=0)
    """Multiplies the answer advantages."""
    lambda_conf: float = Field(1.0, ge=0)
    """Multiplies the confidence advantages; about 4 compensates for centering without σ."""

    @model_validator(mode="after")
    def _check_baseline(self) -> Self:
        if self.confidence.baseline == "label":
            if self.confidence.normalize != "center":
                raise ValueError("confidence.baseline: label needs confidence.normalize: center")
            if self.second_level != "none":
                raise ValueError("confidence.baseline: label needs second_level: none")
        return self

    def compares(self, turn: str) -> bool:
        return self._compares_siblings(turn) and self._get_turn_settings(turn).singleton != "raw"

    def refuses_one(self, turn: str) -> bool:
        refuses = self._get_turn_settings(turn).singleton == "refuse"
        return refuses and self._compares_siblings(turn)

    def _compares_siblings(self, turn: str) -> bool:
        return self._get_turn_settings(turn).baseline == "siblings"

    def get_ddof(self, turn: str) -> Literal[0, 1]:
        return self._get_turn_settings(turn).ddof

    def _get_turn_settings(self, turn: str) -> "ConfidenceSpec | TwoLevel":
        return self.confidence if turn == "confidence" else self

    def warnings(self) -> Sequence[str]:
        if self.confidence.normalize != "std" or self.confidence.baseline != "siblings":
            return ()
        return (
            "estimator.confidence.normalize is 'std': siblings share one label, so σ cancels the "
            "size of the Brier gradient and pushes confidences to 0 or 1 (arXiv 2508.11800); "
            "'center' keeps them calibrated",
        )


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


TurnReduce = Literal["sum", "mean"]
OnMissingTurn = Literal["drop", "to_last_token", "error"]
ScoreSource = Literal["structured", "token_rewards"]
KlKind = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]
Profile = Literal["rlx", "verl", "trl", "kg_r1", "rlcr", "seed000", "seed004"]

PROFILE_ALIASES: Final[dict[Profile, Profile]] = {"seed000": "kg_r1", "seed004": "rlcr"}
"""Deprecated names, which stored experiments have. `kg_r1` is KG-R1 (arXiv 2509.26383), `rlcr`
is RLCR in two turns (arXiv 2507.16806)."""

_CONVENTIONS: Final[dict[Profile, dict[str, Any]]] = {
    "rlx": {},
    "verl": {
        "ddof": 1,
        "eps": 1e-6,
        "singleton": "raw",
        "environment": "skip",
        "whiten": True,
        "renormalize": "tokens",
        "alpha": "scores",
        "returns": "to_go",
    },
    "trl": {"ddof": 1, "eps": 1e-4, "singleton": "refuse", "count_empty_rows": True},
    "kg_r1": {
        "ddof": 1,
        "eps": 1e-6,
        "singleton": "raw",
        "environment": "literal",
        "whiten": True,
    },
    "rlcr": {"ddof": 0, "eps": 1e-4, "singleton": "refuse", "hull": True},
}
"""Options of the estimator, mask and loss that each profile sets unless the YAML does. `rlx` keeps
their own defaults."""

PROFILES: Final[dict[Profile, dict[str, Any]]] = {
    **_CONVENTIONS,
    **{alias: _CONVENTIONS[name] for alias, name in PROFILE_ALIASES.items()},
}


class AdaptiveBeta(StrictModel):
    """Adapts β so that the measured KL approaches a target (Ziegler et al. 2019, section 2.2)."""

    target: float = Field(gt=0)
    """Target KL in nats per token."""
    horizon: float = Field(10_000.0, gt=0)
    """In rollouts; a larger horizon changes β more slowly."""


class PlacementUse(PluginUse):
    """A placement by `plugin`; every other key is an option of the placement."""


def _expand_placement(value: Any) -> Any:
    """A bare name stands for a placement without options."""
    return {"plugin": value} if isinstance(value, str) else value


def _write_bare_name(use: PlacementUse, write: SerializerFunctionWrapHandler) -> Any:
    return write(use) if use.options else use.plugin


class CreditSpec(StrictModel):
    """Where rewards are placed, whether they include KL, and how a row's score is computed."""

    profile: Profile = "rlx"
    """Named conventions of a library or paper; sets options of the estimator and the
    mask that the YAML omits."""
    placement: (
        Annotated[
            PlacementUse,
            BeforeValidator(_expand_placement, json_schema_input_type=str | PlacementUse),
            WrapSerializer(_write_bare_name),
        ]
        | None
    ) = None
    """Which tokens receive a turn's reward: the name of a placement, or `{plugin: NAME}` with its
    options; null uses the profile's. It only affects estimators that read token rewards, and
    `score_source: token_rewards`."""
    turn_reduce: TurnReduce | None = None
    """Whether placed turn rewards are summed or averaged; null uses the placement's default: mean
    for final_token_only, sum for the others, so their totals differ."""
    on_missing_turn: OnMissingTurn = "drop"
    """What happens to a turn's reward if the loss mask excludes every token of the turn."""
    score_source: ScoreSource = "structured"
    """A row's score: mean(turn) + Σ global, or the sum of its token rewards, KL included."""
    use_kl_in_reward: bool = False
    """Subtract β times the KL from the reference policy from the reward of every learning token."""
    kl_penalty: KlKind = "kl"
    """KL estimator; kl is k1."""
    kl_coef: float = Field(0.001, ge=0)
    """β, or its initial value if `kl_adaptive` is set."""
    kl_adaptive: AdaptiveBeta | None = None
    """null keeps β constant."""

    @property
    def canonical_profile(self) -> Profile:
        """The profile by its present name."""
        return PROFILE_ALIASES.get(self.profile, self.profile)

    @property
    def resolved_placement(self) -> PlacementUse:
        """The placement in effect, with the profile's default applied."""
        if self.placement is not None:
            return self.placement
        in_shares = self.canonical_profile == "kg_r1" and self.use_kl_in_reward
        return PlacementUse(plugin="turn_proportional" if in_shares else "final_token_only")
