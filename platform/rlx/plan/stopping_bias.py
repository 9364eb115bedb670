"""Which estimators and losses are biased where the policy decides how many turns it takes.

An estimator is unbiased if its expected gradient has the direction of the gradient of the expected
return. `make bias` computes both on a process that can be enumerated (experiments/bias) and
fails where the causes below do not agree with what it computed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlx.discovery import resolve_plugins
from rlx.plugin import Estimator
from rlx.spec import (
    EnvironmentRolloutSpec,
    ExperimentSpec,
    Gae,
    Gdpo,
    Gigpo,
    Gpg,
    Grpo,
    LossSpec,
    MaxRl,
    MtGrpo,
    MultiturnGrpo,
    Opo,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Remax,
    TreeGrpo,
    TurnLevelGae,
    TwoLevel,
    Uniform,
)
from rlx.spec.reading import Diagnostic, build_warning

_SIGMA = "divides by a σ that contains the rollout's own score"
_SHARES = (
    "adds up rewards from a token on, while turn_proportional places shares of what the token "
    "earns before it"
)
_DISCOUNT = "γ below 1 discounts what comes later"
_CRITIC = "λ below 1 is unbiased only if the critic is exact"
_WHITENED = "whitens over the batch: a long rollout decides more of the mean and of σ"
_TURNS = (
    "credits a turn with its own reward and not with later ones, relative to a mean over turns "
    "that the policy chose to take"
)
_SAFE_ESTIMATORS = "unbiased: rloo, dr_grpo, or gae with `placement: turn_end`, λ = 1, no whitening"
_SAFE_LOSSES = "unbiased: `loss.aggregate: sequence_sum` or `constant`, with `loss.ratio: token`"


@dataclass(frozen=True, slots=True)
class Bias:
    """A cause of bias.

    Attributes:
        of: the estimator, or the loss.
        reason: what it does, in words that follow "the estimator" or "loss.".
        applies: whether options bring it about.
        placements: those under which it holds; empty for all.
    """

    of: type[Estimator] | type[LossSpec]
    reason: str
    applies: Callable[[Any], bool] = lambda options: True
    placements: tuple[str, ...] = ()


def _divides(options: Any) -> bool:
    return options.normalize in ("std", "batch_std")


def _whitens(options: Any) -> bool:
    return bool(options.whiten)


BIASES: tuple[Bias, ...] = (
    Bias(Grpo, _TURNS, lambda o: o.enable_multiturn_advantage),
    Bias(Grpo, _SIGMA, _divides),
    Bias(Uniform, _SIGMA),
    Bias(Gdpo, "divides each reward by a σ that contains the rollout's own", _divides),
    Bias(
        Gdpo,
        "normalizes the sum over the batch, by a σ that contains the rollout's own",
        lambda o: o.renormalize != "none",
    ),
    Bias(Opo, "weighs its baseline by lengths, the rollout's own score included"),
    Bias(Gpg, "scales by the number of nonzero scores", lambda o: o.alpha == "scores"),
    Bias(MaxRl, "divides by a mean that contains the rollout's own score"),
    Bias(PassAtK, "follows another objective: only the best rollout of a group learns"),
    Bias(Remax, _SHARES, lambda o: o.returns == "to_go", ("turn_proportional",)),
    Bias(MultiturnGrpo, _TURNS),
    Bias(MtGrpo, "divides the first turn's reward and the outcome by two different σ"),
    Bias(Gigpo, _SIGMA, _divides),
    Bias(
        Gigpo,
        "weighs a state by how many rollouts of the group come to it",
        lambda o: o.omega != 0,
    ),
    Bias(TreeGrpo, _SIGMA, _divides),
    Bias(TwoLevel, _SIGMA, _divides),
    Bias(ReinforcePlusPlus, _SHARES, placements=("turn_proportional",)),
    Bias(ReinforcePlusPlus, _DISCOUNT, lambda o: o.gamma < 1),
    Bias(ReinforcePlusPlus, _WHITENED, _whitens),
    Bias(ReinforcePlusPlusBaseline, _WHITENED, _whitens),
    Bias(Gae, _SHARES, placements=("turn_proportional",)),
    Bias(Gae, _DISCOUNT, lambda o: o.gamma < 1),
    Bias(Gae, _CRITIC, lambda o: o.lam < 1),
    Bias(Gae, _WHITENED, _whitens),
    Bias(TurnLevelGae, _SHARES, placements=("turn_proportional",)),
    Bias(TurnLevelGae, _DISCOUNT, lambda o: min(o.gamma, o.gamma_high) < 1),
    Bias(TurnLevelGae, _CRITIC, lambda o: min(o.lam, o.lam_high) < 1),
    Bias(TurnLevelGae, _WHITENED, _whitens),
    Bias(
        OptimalTokenBaseline,
        "compares with those that reach the same step, the rollout's own return included",
    ),
    Bias(
        LossSpec,
        "aggregate: token_mean divides by the tokens of the step, the rollout's own included",
        lambda o: o.aggregate == "token_mean",
    ),
    Bias(
        LossSpec,
        "aggregate: sequence_mean divides a rollout's gradient by its own length",
        lambda o: o.aggregate == "sequence_mean",
    ),
    Bias(
        LossSpec,
        "ratio: sequence is a mean over the rollout's own tokens",
        lambda o: o.ratio == "sequence",
    ),
)
"""Every known cause. Estimators that no cause names are unbiased, or not shipped with rlx."""


def list_bias_reasons(options: Estimator | LossSpec, placement: str) -> list[str]:
    """The reasons why an estimator or a loss with these options is biased; empty if there are none.

    Args:
        options: of the estimator, or the `loss` section.
        placement: name of the placement of rewards.
    """
    return [
        bias.reason
        for bias in BIASES
        if type(options) is bias.of
        and bias.applies(options)
        and placement in (bias.placements or (placement,))
    ]


def find_stopping_bias(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields a warning if the policy may end its rollouts and estimator or loss are biased."""
    rollout = spec.rollout
    if not isinstance(rollout, EnvironmentRolloutSpec) or rollout.has_one_turn:
        return
    placement = spec.credit.resolved_placement.plugin
    estimator = list_bias_reasons(resolve_plugins(spec).estimator, placement)
    loss = list_bias_reasons(spec.loss, placement)
    if not estimator and not loss:
        return
    names = [f"estimator '{spec.estimator.plugin}'"] * bool(estimator) + ["the loss"] * bool(loss)
    warning = build_warning(
        ("estimator",) if estimator else ("loss", "aggregate"),
        f"{' and '.join(names)} {'are' if len(names) == 2 else 'is'} biased if the policy decides "
        "when to stop: the expected gradient is not that of the expected return",
        _SAFE_ESTIMATORS if estimator else "",
        _SAFE_LOSSES if loss else "",
        against=("loss",),
    )
    notes = [f"the estimator {reason}" for reason in estimator]
    notes += [f"loss.{reason}" for reason in loss]
    yield replace(warning, notes=(*notes, "experiments/bias/bias.md shows how large each bias is"))
