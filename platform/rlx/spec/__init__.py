"""What an experiment may say. Pydantic only: reading a spec never imports torch."""

from rlx.spec.credit import PROFILES, AdaptiveBeta, CreditSpec
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.loss import EntropyBonus, KlPenalty, LossSpec
from rlx.spec.model import Lora, ModelSpec, Pretrained, Tiny, WarmStart
from rlx.spec.probe import MonteCarloSpec, ProbeSpec
from rlx.spec.reward import GlobalReward, OnError, PluginUse, RewardsSpec, TurnReward, ValueOnError
from rlx.spec.rollout import (
    DynamicSampling,
    EnvironmentUse,
    ForcedAnswer,
    ManyTurn,
    RolloutSpec,
    Single,
    TurnSpec,
    TwoTurn,
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
    "EnvironmentUse",
    "EstimatorUse",
    "EvaluationSpec",
    "ExperimentSpec",
    "ForcedAnswer",
    "GlobalReward",
    "KlPenalty",
    "Lora",
    "LossSpec",
    "ManyTurn",
    "MaskUse",
    "ModelSpec",
    "MonteCarloSpec",
    "OnError",
    "OptimizerSpec",
    "PhaseSpec",
    "PluginUse",
    "Pretrained",
    "ProbeSpec",
    "RewardsSpec",
    "RolloutSpec",
    "RunnerSpec",
    "SamplerSpec",
    "Single",
    "Tiny",
    "TrackingSpec",
    "TransformersSamplerSpec",
    "TurnReward",
    "TurnSpec",
    "TwoTurn",
    "ValueOnError",
    "VllmSamplerSpec",
    "WarmStart",
]
