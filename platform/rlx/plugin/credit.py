"""Estimators and masks: descriptors that name their implementation, imported only by a run."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from rlx.plugin.base import Plugin

__all__ = ["Estimator", "Mask", "Reading"]

Reading = Literal["scores", "turns", "token_rewards"]


class Estimator(Plugin):
    """Options of an advantage estimator. `implementation` is called as `f(inputs, **options)`.

    Attributes:
        implementation: "module:function"; takes `rlx.credit.CreditInputs`, returns `[B, T]` or a
            `rlx.credit.Credit`.
        reads: which rewards it looks at: "scores" (one number per row, of `total_scores`), "turns"
            (the named rewards themselves), or "token_rewards" (as placed, KL included).
    """

    implementation: ClassVar[str]
    reads: ClassVar[Reading] = "scores"

    def reading(self) -> Reading:
        """As `reads`, for an estimator whose options decide it."""
        return self.reads

    def compares(self, turn: str) -> bool:
        """Whether a turn of this kind learns nothing without siblings to be compared with."""
        return False

    def refuses_one(self, turn: str) -> bool:
        """Whether an experiment that samples one turn of this kind per group is an error."""
        return False

    def warnings(self) -> Sequence[str]:
        """Sentences to show when the YAML is read, each saying why."""
        return ()


class Mask(Plugin):
    """Options of a mask strategy. `implementation` is called as `f(batch, **options)`.

    Attributes:
        implementation: "module:function"; takes `rlx.batch.TokenBatch`, returns bool `[B, T]`.
        beyond_own: whether tokens that the policy did not write may learn.
    """

    implementation: ClassVar[str]
    beyond_own: ClassVar[bool] = False

    def reaches_beyond(self) -> bool:
        """As `beyond_own`, for a mask whose options decide it."""
        return self.beyond_own
