"""What an experiment may say. Pydantic only: reading a spec never imports torch."""

from rlx.spec.credit import PROFILES, AdaptiveBeta, CreditSpec
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.loss import EntropyBonus, KlPenalty, LossSpec
from rlx.spec.model import Lora, ModelSpec, PretrainedModelSpec, TinyModelSpec, WarmStart
from rlx.spec.probe import MonteCarloSpec, ProbeSpec
from rlx.spec.reward import GlobalReward, OnError, PluginUse, RewardsSpec, TurnReward, ValueOnError
from rlx.spec.rollout import (
    DynamicSampling,
    EnvironmentRolloutSpec,
    EnvironmentUse,
    ForcedAnswer,
    RolloutSpec,
    SingleRolloutSpec,
    TurnSpec,
    TwoTurnRolloutSpec,
)
from rlx.spec.sections import EstimatorUse, MaskUse
from rlx.spec.training import (
    CriticSpec,
    EvaluationSpec,
    OptimizerSpec,
    PhaseSpec,
    RunnerSpec,
    SamplerSpec,
    TrackingSpec,
    TransformersSamplerSpec,
    VllmSamplerSpec,
)

__all__ = [
    "PROFILES",
    "AdaptiveBeta",
    "CreditSpec",
    "CriticSpec",
    "DynamicSampling",
    "EntropyBonus",
    "EnvironmentRolloutSpec",
    "EnvironmentUse",
    "EstimatorUse",
    "EvaluationSpec",
    "ExperimentSpec",
    "ForcedAnswer",
    "GlobalReward",
    "KlPenalty",
    "Lora",
    "LossSpec",
    "MaskUse",
    "ModelSpec",
    "MonteCarloSpec",
    "OnError",
    "OptimizerSpec",
    "PhaseSpec",
    "PluginUse",
    "PretrainedModelSpec",
    "ProbeSpec",
    "RewardsSpec",
    "RolloutSpec",
    "RunnerSpec",
    "SamplerSpec",
    "SingleRolloutSpec",
    "TinyModelSpec",
    "TrackingSpec",
    "TransformersSamplerSpec",
    "TurnReward",
    "TurnSpec",
    "TwoTurnRolloutSpec",
    "ValueOnError",
    "VllmSamplerSpec",
    "WarmStart",
]
