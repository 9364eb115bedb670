"""What an experiment may say. Pydantic only: reading a spec never imports torch."""

from rlx.spec.experiment import EstimatorUse, ExperimentSpec, MaskUse
from rlx.spec.loss import EntropyBonus, LossSpec
from rlx.spec.model import Lora, ModelSpec, Pretrained, Tiny, WarmStart
from rlx.spec.reward import GlobalReward, OnError, PluginUse, RewardsSpec, TurnReward, ValueOnError
from rlx.spec.rollout import RolloutSpec, Single, TurnSpec, TwoTurn
from rlx.spec.training import (
    EvaluationSpec,
    OptimizerSpec,
    PhaseSpec,
    RunnerSpec,
    TrackingSpec,
    TransformersSampler,
)

__all__ = [
    "EntropyBonus",
    "EstimatorUse",
    "EvaluationSpec",
    "ExperimentSpec",
    "GlobalReward",
    "Lora",
    "LossSpec",
    "MaskUse",
    "ModelSpec",
    "OnError",
    "OptimizerSpec",
    "PhaseSpec",
    "PluginUse",
    "Pretrained",
    "RewardsSpec",
    "RolloutSpec",
    "RunnerSpec",
    "Single",
    "Tiny",
    "TrackingSpec",
    "TransformersSampler",
    "TurnReward",
    "TurnSpec",
    "TwoTurn",
    "ValueOnError",
    "WarmStart",
]
