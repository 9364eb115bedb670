from .evaluation import (
    EvaluationRequest,
    SuiteEvaluation,
    build_requested_suite,
    build_set_spec,
    evaluate,
)
from .probing import ModelProbe, ProbeRequest, probe_model
from .rescoring import ChangedRow, RescoreRequest, Rescoring, rescore
from .stored_steps import StepAccounts, load_step_accounts, select_rollout_steps
from .target import TrainedModel

__all__ = [
    "ChangedRow",
    "EvaluationRequest",
    "ModelProbe",
    "ProbeRequest",
    "RescoreRequest",
    "Rescoring",
    "StepAccounts",
    "SuiteEvaluation",
    "TrainedModel",
    "build_requested_suite",
    "build_set_spec",
    "evaluate",
    "load_step_accounts",
    "probe_model",
    "rescore",
    "select_rollout_steps",
]
