"""Who acts in a training step, as `rlx.step` sees it: `rlx.run` provides the actors."""

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from rlx.reward import RewardTable
from rlx.rollout import RolloutTree
from rlx.train_batch import ScoredRows, TokenStreams, TrainBatch


class Rollouts(Protocol):
    """Sampled trees with their rewards."""

    @property
    def trees(self) -> Sequence[RolloutTree]:
        """In the order in which their problems were drawn."""

    @property
    def table(self) -> RewardTable:
        """Rewards of the trees."""

    def find_untrained_rows(self) -> Collection[tuple[int, int]]:
        """Rows to leave out, each as `(tree, segment)` of its last turn."""


R = TypeVar("R", bound=Rollouts)
L = TypeVar("L", covariant=True)


class Actors(Protocol[R, L]):
    """The sampler, the models and the learner of a rank; `L` is what an update tells."""

    def sample_and_score(self) -> R:
        """Samples and scores the rollouts of the step."""

    def compute_streams(self, rollouts: R, rows: ScoredRows) -> TokenStreams:
        """Computes what the estimator and the loss read besides the rewards."""

    def update_models(self, train: TrainBatch) -> L:
        """Takes the step's optimizer steps."""


class StepResult(NamedTuple, Generic[R, L]):
    """Result of a step: its rollouts, the trained batch and the update; None if nothing trained."""

    rollouts: R
    train: TrainBatch | None
    learned: L | None
