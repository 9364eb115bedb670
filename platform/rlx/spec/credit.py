"""The `credit:` section: how rewards become scores and token rewards, for any estimator."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, WrapSerializer

from rlx.plugin import StrictModel
from rlx.spec.reward import PluginUse

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
