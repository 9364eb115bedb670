"""The objects of one rank that live as long as its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who only reads a context need not wait for DeepSpeed
    from rlx.home import RunFolder
    from rlx.learner import Critic, Learner, Ranks, ReferencePolicy
    from rlx.model import Policy
    from rlx.record import Recorder
    from rlx.reward import JobPool
    from rlx.run.progress import ProgressFile
    from rlx.sampler import SamplingEngine
    from rlx.spec import ExperimentSpec


__all__ = ["RunContext"]


@dataclass(frozen=True, slots=True)
class RunContext:
    """The objects of one rank that live as long as its run.

    Attributes:
        critic: None if no estimator of the run needs values.
        reference: None if the run uses no KL divergence from a reference policy.
        recorder: None except on rank 0.
    """

    spec: ExperimentSpec
    folder: RunFolder
    ranks: Ranks
    policy: Policy
    sampler: SamplingEngine
    learner: Learner
    critic: Critic | None
    reference: ReferencePolicy | None
    pool: JobPool
    recorder: Recorder | None
    progress: ProgressFile
