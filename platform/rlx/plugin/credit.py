"""Descriptors of estimators, masks and placements. Only a run imports what they name."""

from typing import ClassVar, Literal

from rlx.plugin.base import Plugin

Reading = Literal["scores", "turns", "token_rewards"]


class Estimator(Plugin):
    """Options of an advantage estimator.

    Attributes:
        implementation: "module:function". Called as `f(inputs, options)` with the
            `rlx.credit.CreditInputs` and this object; without a parameter `options`, with each
            option by its name. Returns `[B, T]` or a `rlx.credit.Credit`.
        reads: the rewards that it uses: "scores" (one per row, see `total_scores`), "turns"
            (the named rewards), or "token_rewards" (as placed, KL included).
    """

    implementation: ClassVar[str]
    reads: ClassVar[Reading] = "scores"

    def reading(self) -> Reading:
        """Like `reads`, for an estimator whose options decide it."""
        return self.reads

    def compares(self, turn: str) -> bool:
        """Whether a turn of this kind needs siblings to be compared with in order to learn."""
        return False

    def refuses_one(self, turn: str) -> bool:
        """Whether sampling only one turn of this kind per group is an error."""
        return False

    def get_ddof(self, turn: str) -> Literal[0, 1]:
        """Degrees of freedom of σ over a group of turns of this kind: 1, or 0 for a population."""
        return 1


class Mask(Plugin):
    """Options of a mask strategy.

    Attributes:
        implementation: "module:function". Called as `f(batch, options)` with the
            `rlx.batch.TokenBatch` and this object; without a parameter `options`, with each option
            by its name. Returns bool `[B, T]`.
        beyond_own: whether tokens that the policy did not write may learn.
    """

    implementation: ClassVar[str]
    beyond_own: ClassVar[bool] = False

    def reaches_beyond(self) -> bool:
        """Like `beyond_own`, for a mask whose options decide it."""
        return self.beyond_own


class Placement(Plugin):
    """Options of a placement: which tokens receive the rewards of turns and rollouts.

    Attributes:
        implementation: "module:function". Called as `f(inputs, options)` with the
            `rlx.credit.CreditInputs` and this object; without a parameter `options`, with each
            option by its name. Returns the rewards on tokens, `[B, T]`.
        turn_reduce: whether the rewards of turns are summed or averaged, unless the YAML says.
        needs_turn_tokens: whether a turn's reward lies on tokens of that turn. If so, that of a
            turn without tokens is dropped or moved, as `on_missing_turn` says.
    """

    implementation: ClassVar[str]
    turn_reduce: ClassVar[Literal["sum", "mean"]] = "sum"
    needs_turn_tokens: ClassVar[bool] = True
