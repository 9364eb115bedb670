"""Schedules and rollout trees: what will be sampled, and what was."""

from rlx.plugin.environment import FAILED
from rlx.rollout.dialogue import (
    Dialogue,
    Pieces,
    Reader,
    TurnPrompt,
    encode_between_turns,
    pieces_of,
)
from rlx.rollout.environment import Talk, is_fault
from rlx.rollout.host import EnvironmentHost, Fault, LocalHost, check_environment_step
from rlx.rollout.schedule import RolloutPlan, TurnLevel, build_rollout_plan, sample_rollout_trees
from rlx.rollout.session import Completion, Request, Sampler, Session
from rlx.rollout.spans import find_spans
from rlx.rollout.tree import NO_PARENT, Author, RolloutTree, Segment, Span

__all__ = [
    "FAILED",
    "NO_PARENT",
    "Author",
    "Completion",
    "Dialogue",
    "EnvironmentHost",
    "Fault",
    "LocalHost",
    "Pieces",
    "Reader",
    "Request",
    "RolloutPlan",
    "RolloutTree",
    "Sampler",
    "Segment",
    "Session",
    "Span",
    "Talk",
    "TurnLevel",
    "TurnPrompt",
    "build_rollout_plan",
    "check_environment_step",
    "encode_between_turns",
    "find_spans",
    "is_fault",
    "pieces_of",
    "sample_rollout_trees",
]
