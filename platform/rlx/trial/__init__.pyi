from .budget import MemoryEstimate, TokenBudget, estimate_memory, token_budget
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
    "estimate_memory",
    "group_equal_phases",
    "list_trial_settings",
    "load_plan_problems",
    "load_speech",
    "run_phase_trial",
    "run_trial",
    "token_budget",
]
