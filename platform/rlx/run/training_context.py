"""The context of a training step: a `RunContext` with the prefetcher of rollouts."""

from dataclasses import dataclass

from rlx.run.prefetcher import Prefetcher
from rlx.run.run_context import RunContext

__all__ = ["TrainingContext"]


@dataclass(frozen=True, slots=True)
class TrainingContext(RunContext):
    """A `RunContext` with the prefetcher of the next step's rollouts.

    Attributes:
        prefetcher: idle if the experiment trains on-policy.
    """

    prefetcher: Prefetcher
