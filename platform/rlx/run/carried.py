"""What one training step hands to the next, apart from weights and optimisers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlx.kl import AdaptiveKl, FixedKl, mean_kl
from rlx.spec import CreditSpec
from rlx.step import TrainBatch

__all__ = ["Carried"]


@dataclass(frozen=True, slots=True)
class Carried:
    """State of controllers and estimators; recorded with every step.

    Attributes:
        kl: β of KL in the reward.
        estimator: what the estimator carries on, such as a running scale.
        told: the settings that `kl` began with.
    """

    kl: FixedKl | AdaptiveKl
    estimator: Mapping[str, float] = field(default_factory=dict)
    told: tuple[object, ...] = ()

    @staticmethod
    def begin(credit: CreditSpec, before: "Carried | None") -> "Carried":
        """What a phase begins with: what was carried so far, unless its settings of β are new."""
        told = (credit.kl_coef, credit.kl_adaptive)
        if before is not None and before.told == told:
            return before
        kl: FixedKl | AdaptiveKl = FixedKl(beta=credit.kl_coef)
        if credit.kl_adaptive is not None:
            target, horizon = credit.kl_adaptive.target, credit.kl_adaptive.horizon
            kl = AdaptiveKl(beta=credit.kl_coef, target=target, horizon=horizon)
        return Carried(kl, {} if before is None else before.estimator, told)

    def after(self, train: TrainBatch, credit: CreditSpec) -> "Carried":
        """What goes on after a step."""
        carried = replace(self, estimator=dict(train.state))
        if train.kl is None or not credit.use_kl_in_reward or not train.mask.any():
            return carried
        measured = float(mean_kl(train.kl, train.mask))
        return replace(carried, kl=self.kl.update(measured, len(train.batch.rows)))
