from .budget import (
    MemoryEstimate,
    TokenBudget,
    estimate_memory,
    estimate_update_bytes,
    token_budget,
)
from .model_shape import estimate_checkpoint_bytes, load_model_shape
from .phases import group_equal_phases, list_trial_settings, run_phase_trial
from .stand_ins import EncodingDialogue, PlanSpeech, load_plan_problems, load_speech
from .synthetic_rollouts import Place, PlanTrial, describe_row_kind, run_trial

__all__ = [
    "EncodingDialogue",
    "MemoryEstimate",
    "Place",
    "PlanSpeech",
    "PlanTrial",
    "TokenBudget",
    "describe_row_kind",
    "estimate_checkpoint_bytes",
    "estimate_memory",
    "estimate_update_bytes",
    "group_equal_phases",
    "list_trial_settings",
    "load_model_shape",
    "load_plan_problems",
    "load_speech",
    "run_phase_trial",
    "run_trial",
    "token_budget",
]
