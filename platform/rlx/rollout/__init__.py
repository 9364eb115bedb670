"""Schedules and rollout trees: what will be sampled, and what was."""

from rlx.rollout.schedule import (
    Completion,
    Dialogue,
    Level,
    Request,
    RolloutPlan,
    Sampler,
    Session,
    grow,
    plan,
)
from rlx.rollout.spans import find_spans
from rlx.rollout.tree import NO_PARENT, Author, RolloutTree, Segment, Span

__all__ = [
    "NO_PARENT",
    "Author",
    "Completion",
    "Dialogue",
    "Level",
    "Request",
    "RolloutPlan",
    "RolloutTree",
    "Sampler",
    "Segment",
    "Session",
    "Span",
    "find_spans",
    "grow",
    "plan",
]
