from .budget import (
    MemoryEstimate,
    estimate_finish_bytes,
    estimate_update_bytes,
    token_budget,
)
from .gpu_room import USABLE_GIB, compute_gpu_shares, get_usable_share
from .loading import LoadingMemory, estimate_loading, estimate_memory
from .model_shape import ModelShape, estimate_checkpoint_bytes, load_model_shape
from .phases import group_equal_phases, list_trial_settings, run_phase_trial
from .stand_ins import EncodingDialogue, PlanSpeech, load_plan_problems, load_speech
from .synthetic_rollouts import Place, PlanTrial, describe_row_kind, run_trial
from .token_counts import LevelTokens, TokenBudget

__all__ = [
    "USABLE_GIB",
    "EncodingDialogue",
    "LevelTokens",
    "LoadingMemory",
    "MemoryEstimate",
    "ModelShape",
    "Place",
    "PlanSpeech",
    "PlanTrial",
    "TokenBudget",
    "compute_gpu_shares",
    "describe_row_kind",
    "estimate_checkpoint_bytes",
    "estimate_finish_bytes",
    "estimate_loading",
    "estimate_memory",
    "estimate_update_bytes",
    "get_usable_share",
    "group_equal_phases",
    "list_trial_settings",
    "load_model_shape",
    "load_plan_problems",
    "load_speech",
    "run_phase_trial",
    "run_trial",
    "token_budget",
]
