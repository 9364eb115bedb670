from .budget import MemoryEstimate, TokenBudget, estimate_memory, token_budget
from .stand_ins import EncodingDialogue, load_plan_problems, load_speech
from .synthetic_rollouts import Place, PlanTrial, describe_row_kind, run_trial

__all__ = [
    "EncodingDialogue",
    "MemoryEstimate",
    "Place",
    "PlanTrial",
    "TokenBudget",
    "describe_row_kind",
    "estimate_memory",
    "load_plan_problems",
    "load_speech",
    "run_trial",
    "token_budget",
]
