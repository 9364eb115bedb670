"""What lives as long as a run does."""

from dataclasses import dataclass

from rlx.home import RunFolder
from rlx.learner import Critic, Learner, Ranks, ReferencePolicy
from rlx.model import Policy
from rlx.record import Recorder
from rlx.reward import RewardPool
from rlx.run.progress import ProgressFile
from rlx.sampler import SamplingEngine
from rlx.spec import ExperimentSpec

__all__ = ["RunContext"]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What lives as long as the run does.

    Attributes:
        critic: None where no estimator of the run needs values.
        reference: None where KL from a reference policy is used nowhere.
        recorder: on rank 0; None elsewhere.
    """

    spec: ExperimentSpec
    folder: RunFolder
    ranks: Ranks
    policy: Policy
    sampler: SamplingEngine
    learner: Learner
    critic: Critic | None
    reference: ReferencePolicy | None
    pool: RewardPool
    recorder: Recorder | None
    progress: ProgressFile
