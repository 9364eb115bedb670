"""Schedules, rollout trees, and the sampling of trees with or without an environment."""

from rlx.plugin import FAILED, TurnLevel
from rlx.rollout.curriculum import Curriculum, compute_draw_probability
from rlx.rollout.dialogue import (
    Dialogue,
    Pieces,
    TokenReader,
    TurnPrompt,
    build_piece_splitter,
    encode_between_turns,
    encode_opening,
    fill_turn_template,
)
from rlx.rollout.environment import EnvironmentPlan, build_talk, is_fault_segment
from rlx.rollout.game import derive_turn_seed
from rlx.rollout.host import EnvironmentHost, HostFault, LocalHost, check_environment_step
from rlx.rollout.own_schedule import build_turn_segment
from rlx.rollout.prompt_limit import DrawnProblems, PromptFit, PromptLength, measure_prompt
from rlx.rollout.schedule import RolloutPlan, build_rollout_plan, sample_rollout_trees
from rlx.rollout.session import Completion, CompletionRequest, Sampler, SamplingSession
from rlx.rollout.spans import find_hull, find_spans
from rlx.rollout.tree import NO_PARENT, Author, RolloutTree, Segment, Span, join_spans

__all__ = [
    "FAILED",
    "NO_PARENT",
    "Author",
    "Completion",
    "CompletionRequest",
    "Curriculum",
    "Dialogue",
    "DrawnProblems",
    "EnvironmentHost",
    "EnvironmentPlan",
    "HostFault",
    "LocalHost",
    "Pieces",
    "PromptFit",
    "PromptLength",
    "RolloutPlan",
    "RolloutTree",
    "Sampler",
    "SamplingSession",
    "Segment",
    "Span",
    "TokenReader",
    "TurnLevel",
    "TurnPrompt",
    "build_piece_splitter",
    "build_rollout_plan",
    "build_talk",
    "build_turn_segment",
    "check_environment_step",
    "compute_draw_probability",
    "derive_turn_seed",
    "encode_between_turns",
    "encode_opening",
    "fill_turn_template",
    "find_hull",
    "find_spans",
    "is_fault_segment",
    "join_spans",
    "measure_prompt",
    "sample_rollout_trees",
]
