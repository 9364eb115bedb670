"""Schedules and rollout trees: what will be sampled, and what was."""

from rlx.plugin.environment import FAILED
from rlx.rollout.dialogue import Dialogue, Pieces, Reader, Shown, between, pieces_of
from rlx.rollout.environment import Talk, is_fault
from rlx.rollout.host import Fault, Host, LocalHost, checked
from rlx.rollout.schedule import Level, RolloutPlan, grow, plan
from rlx.rollout.session import Completion, Request, Sampler, Session
from rlx.rollout.spans import find_spans
from rlx.rollout.tree import NO_PARENT, Author, RolloutTree, Segment, Span

__all__ = [
    "FAILED",
    "NO_PARENT",
    "Author",
    "Completion",
    "Dialogue",
    "Fault",
    "Host",
    "Level",
    "LocalHost",
    "Pieces",
    "Reader",
    "Request",
    "RolloutPlan",
    "RolloutTree",
    "Sampler",
    "Segment",
    "Session",
    "Shown",
    "Span",
    "Talk",
    "between",
    "checked",
    "find_spans",
    "grow",
    "is_fault",
    "pieces_of",
    "plan",
]
