"""Recompute the credit assignment of a recorded step, and report violations of identities."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.assignment import build_scored_rows
from rlx.batch import TokenBatch, list_batch_rows
from rlx.credit import CreditInputs
from rlx.phase_setup import PhaseSetup
from rlx.plugin import Estimator, Mask
from rlx.record import StoredStep, TrainedRows
from rlx.reward import RewardPool
from rlx.run import read_token_streams
from rlx.step import assign_credit
from rlx.train_batch import ScoredRows, TrainBatch

VIOLATIONS_KEPT = 3
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
        setup: setup of the phase, from the run's spec.
        strategy: options of `setup.mask`.
        estimator: options of `setup.estimator`.
        beta: β of KL in the reward.
        state: estimator state carried over from the previous step.
        max_tokens: token budget of each kind of turn.
        pool: workers that score rewards.
    """

    step: int
    stored: StoredStep
    setup: PhaseSetup
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
    def scored_rows(self) -> ScoredRows:
        """The trained rows, flattened again from the stored trees, with their stored rewards."""
        trained = {(tree, segment) for tree, segment, *_ in self.rows.places}
        every = {(row.tree, row.segment) for row in list_batch_rows(self.stored.trees)}
        rows = build_scored_rows(
            self.setup,
            self.stored.trees,
            self.stored.rewards,
            without=every - trained,
            mask=self.mask,
        )
        if rows is None:
            raise ValueError(f"step {self.step} has no trained rows")
        return rows

    @property
    def batch(self) -> TokenBatch:
        """The trained rows as tokens."""
        return self.scored_rows.batch

    @property
    def rewards(self) -> CreditInputs:
        """Row rewards, summed from the stored scores."""
        return self.scored_rows.rewards

    @cached_property
    def recomputed_batch(self) -> TrainBatch:
        """The step's credit assignment, recomputed."""
        streams = read_token_streams(
            self.rows,
            self.batch,
            torch.arange(len(self.rows.places)),
            recomputed={},
            beta=self.beta,
            state=self.state,
        )
        rules = replace(self.setup.rules, max_tokens=self.max_tokens)
        return assign_credit(self.scored_rows, streams, rules)

    @cached_property
    def mask(self) -> Tensor:
        """`[B, T]` bool, as stored."""
        return self.get_token_stream("mask")

    @property
    def credited(self) -> Tensor:
        """`[B, T]` bool tokens in the mask that have the estimator's credit: all but those of
        confidences whose expected score is in the loss."""
        expected = self.recomputed_batch.expected
        return self.mask if expected is None else self.mask & ~expected.tokens

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
        places = [tuple(place) for place in wrong.nonzero()[:VIOLATIONS_KEPT].tolist()]
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
