"""What a training step works with: all that lives as long as the run, and rollouts ahead of it."""

from dataclasses import dataclass

from rlx.run.prefetcher import Prefetcher
from rlx.run.run_context import RunContext

__all__ = ["TrainingContext"]


@dataclass(frozen=True, slots=True)
class TrainingContext(RunContext):
    """A `RunContext` with what samples the next step's rollouts.

    Attributes:
        prefetcher: idle where the experiment trains on rollouts of the step itself.
    """

    prefetcher: Prefetcher
