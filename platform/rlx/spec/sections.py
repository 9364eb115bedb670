"""The sections of an experiment, each a field; what they mean together is checked elsewhere."""

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
    """An advantage estimator by `name`, with its own options beside it."""

    plugin: str = Field("grpo", alias="name")


class MaskUse(PluginUse):
    """A mask strategy by `strategy`, with its own options beside it."""

    plugin: str = Field("turn_spans", alias="strategy")


class ExperimentSections(StrictModel):
    """What an experiment consists of, section by section."""

    # Defaults of ours need no validation, and with it every command would build their schemas.
    name: str = Field(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**31)
    from_checkpoint: str | None = None
    """A checkpoint of another run to go on from, `RUN@STEP` or `RUN@latest`; null: from the model
    as it is."""
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
        """Training steps of all phases together."""
        return sum(phase.steps for phase in self.phases)
