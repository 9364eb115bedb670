"""The sections of an experiment file. `rlx.spec.consistency` checks them against each other."""

from pydantic import Field

from rlx.spec.base import StrictModel
from rlx.spec.credit import CreditSpec
from rlx.spec.loss import LossSpec
from rlx.spec.model import ModelSpec
from rlx.spec.probe import MonteCarloSpec, ProbeSpec
from rlx.spec.reward import PluginUse, RewardsSpec
from rlx.spec.rollout import RolloutSpec, SingleRolloutSpec
from rlx.spec.training import (
    CriticSpec,
    EvaluationSpec,
    OptimizerSpec,
    PhaseSpec,
    RunnerSpec,
    SamplerSpec,
    TrackingSpec,
    TransformersSamplerSpec,
)

__all__ = ["EstimatorUse", "ExperimentSections", "MaskUse"]


class EstimatorUse(PluginUse):
    """An advantage estimator by `name`; every other key is an option of the estimator."""

    plugin: str = Field("grpo", alias="name")


class MaskUse(PluginUse):
    """A mask strategy by `strategy`; every other key is an option of the strategy."""

    plugin: str = Field("turn_spans", alias="strategy")


class ExperimentSections(StrictModel):
    """The sections of an experiment."""

    # `model_construct` skips validation of defaults, which would build their schemas at import.
    name: str = Field(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**31)
    from_checkpoint: str | None = None
    """A checkpoint of another run to start from, `RUN@STEP` or `RUN@latest`; null starts from
    `model`."""
    model: ModelSpec
    task: PluginUse
    rollout: RolloutSpec = SingleRolloutSpec.model_construct()
    rewards: RewardsSpec
    mask: MaskUse = MaskUse.model_construct()
    credit: CreditSpec = CreditSpec.model_construct()
    estimator: EstimatorUse = EstimatorUse.model_construct()
    critic: CriticSpec | None = None
    monte_carlo: MonteCarloSpec | None = None
    loss: LossSpec = LossSpec.model_construct()
    optimizer: OptimizerSpec = OptimizerSpec.model_construct()
    phases: tuple[PhaseSpec, ...] = Field(min_length=1)
    runner: RunnerSpec = RunnerSpec.model_construct()
    sampler: SamplerSpec = TransformersSamplerSpec.model_construct()
    evaluation: EvaluationSpec = EvaluationSpec.model_construct()
    probe: ProbeSpec | None = None
    tracking: TrackingSpec = TrackingSpec.model_construct()

    @property
    def steps(self) -> int:
        """Total training steps of all phases."""
        return sum(phase.steps for phase in self.phases)
