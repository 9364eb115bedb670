"""Recompute the credit assignment of a recorded step, and report violations of identities."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.batch import TokenBatch, build_token_batch, list_batch_rows
from rlx.plugin import Estimator, Mask
from rlx.recipe import Recipe
from rlx.record import StoredStep, TrainedRows
from rlx.reward import RewardPool
from rlx.row_rewards import build_row_rewards
from rlx.run import collect_state_values
from rlx.step import RowRewards, TokenStreams, TrainBatch, assign_credit

__all__ = ["SHOWN", "IdentityResult", "StepEvidence", "Value", "Violation"]

SHOWN = 3
"""Violations reported per identity and step; further ones are only counted."""

Value = float | str | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A stored value that differs from the expected one.

    Attributes:
        step: step of the run, from 1.
        tree: tree of the step.
        row: row of the step's batch; None if the item was not trained on.
        turn: turn number, from 1; None if the figure belongs to no turn.
        token: position in the row, 0 for the prompt's first token; None if it belongs to no token.
        what: name of the figure, such as "advantages" or "reward accuracy".
        stored, expected: the stored and the expected value.
    """

    step: int
    tree: int | None = None
    row: int | None = None
    turn: int | None = None
    token: int | None = None
    what: str
    stored: Value
    expected: Value


class IdentityResult(NamedTuple):
    """Result of one identity in one step: items checked, number of violations, the first ones."""

    checked: int
    violated: int = 0
    first: tuple[Violation, ...] = ()


@dataclass(frozen=True, eq=False)
class StepEvidence:
    """One stored step with everything needed to recompute its figures.

    Attributes:
        step: step number.
        stored: the step as read from disk; it has trained rows.
        recipe: recipe of the phase, from the run's spec.
        strategy: options of `recipe.mask`.
        estimator: options of `recipe.estimator`.
        beta: β of KL in the reward.
        state: estimator state carried over from the previous step.
        max_tokens: token budget of each kind of turn.
        pool: workers that score rewards.
    """

    step: int
    stored: StoredStep
    recipe: Recipe
    strategy: Mask
    estimator: Estimator
    beta: float
    state: Mapping[str, float]
    max_tokens: Mapping[str, int]
    pool: RewardPool

    @property
    def rows(self) -> TrainedRows:
        """The trained rows."""
        return self.stored.rows

    @cached_property
    def batch(self) -> TokenBatch:
        """The trained rows, flattened again from the stored trees."""
        trained = {(tree, segment) for tree, segment, *_ in self.rows.places}
        every = {(row.tree, row.segment) for row in list_batch_rows(self.stored.trees)}
        return build_token_batch(
            self.stored.trees, temperatures=self.recipe.temperatures, without=every - trained
        )

    @cached_property
    def rewards(self) -> RowRewards:
        """Row rewards, summed from the stored scores."""
        return build_row_rewards(self.batch, self.stored.trees, self.stored.rewards)

    def _states(self) -> dict[str, Tensor]:
        """Reasoning steps and Monte-Carlo state values; empty if the step has none."""
        steps, values = self.rows.tokens["step_ids"], self.rows.tokens["mc_values"]
        if steps is None or values is None:
            return {}
        steps = torch.where(self.batch.is_own, steps, -1)
        return {"step_ids": steps, "mc_values": collect_state_values(steps, values)}

    @cached_property
    def recomputed_batch(self) -> TrainBatch:
        """The step's credit assignment, recomputed."""
        streams = TokenStreams(
            old_logprobs=self.get_token_stream("old_logprobs"),
            reference_logprobs=self.rows.tokens["reference_logprobs"],
            values=self.rows.tokens["values"],
            greedy_scores=self.rows.scores.get("greedy_score"),
            **self._states(),
            beta=self.beta,
            state=self.state,
        )
        return assign_credit(
            self.batch,
            self.rewards,
            self.mask,
            streams,
            estimator=self.recipe.estimator,
            credit=self.recipe.spec.credit,
            loss=self.recipe.spec.loss,
            max_tokens=self.max_tokens,
        )

    @cached_property
    def mask(self) -> Tensor:
        """`[B, T]` bool, as stored."""
        return self.get_token_stream("mask")

    def get_token_stream(self, name: str) -> Tensor:
        """A stored stream that every step has.

        Raises:
            ValueError: the step has no such stream.
        """
        tensor = self.rows.tokens[name]
        if tensor is None:
            raise ValueError(f"step {self.step} has no {name}")
        return tensor

    def collect_violations(
        self, what: str, stored: Tensor, expected: Tensor, wrong: Tensor, checked: int
    ) -> IdentityResult:
        """Collects the violations marked in `wrong`, per token (`[B, T]`) or per row (`[B]`)."""
        places = [tuple(place) for place in wrong.nonzero()[:SHOWN].tolist()]
        first = tuple(
            self.violation(
                what, _convert_to_scalar(stored[place]), _convert_to_scalar(expected[place]), *place
            )
            for place in places
        )
        return IdentityResult(checked, int(wrong.sum()), first)

    def violation(
        self, what: str, stored: Value, expected: Value, row: int, token: int | None = None
    ) -> Violation:
        """A violation of a row, or of one of its tokens."""
        turn = int(self.batch.turn_ids[row, token]) if token is not None else 0
        return Violation(
            step=self.step,
            tree=self.batch.rows[row].tree,
            row=row,
            turn=turn if turn > 0 else None,
            token=token,
            what=what,
            stored=stored,
            expected=expected,
        )


def _convert_to_scalar(value: Tensor) -> float | bool:
    number: float | bool = value.item()
    return number
