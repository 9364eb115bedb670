"""Samples rollout trees by the function of a schedule's own, and checks what it returns."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlx.discovery import import_implementation
from rlx.errors import PluginError, RlxError
from rlx.plugin import Problem, Schedule, TurnSpec
from rlx.rollout.dialogue import Dialogue
from rlx.rollout.session import Completion, SamplingSession
from rlx.rollout.spans import find_hull, find_spans
from rlx.rollout.tree import RolloutTree, Segment

__all__ = ["build_turn_segment", "sample_own_trees"]


def build_turn_segment(
    completion: Completion,
    dialogue: Dialogue,
    turn: TurnSpec,
    *,
    parent: int,
    number: int,
    kind: str,
    seed: int,
) -> Segment:
    """Builds the segment of a sampled turn, with its text and its spans.

    Args:
        completion: what was sampled.
        dialogue: converts tokens to text.
        turn: settings that it was sampled with.
        parent: index of the segment that it continues.
        number: number of the turn in its rollout, from 1.
        kind: kind of turn.
        seed: seed that it was sampled from.
    """
    text, ends = dialogue.read(completion.token_ids)
    return Segment(
        parent=parent,
        author="policy",
        token_ids=completion.token_ids,
        turn=number,
        kind=kind,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        text=text,
        spans=find_spans(text, ends, turn.spans, first_turn=number == 1),
        hull=find_hull(text, ends, turn.spans, first_turn=number == 1),
        seed=seed,
    )


def sample_own_trees(
    settings: Schedule,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    session: SamplingSession,
    dialogue: Dialogue,
) -> list[RolloutTree]:
    """Samples one tree per problem by the function that the schedule names.

    Raises:
        PluginError: the function fails, or its trees do not have the schedule's turns.
    """
    sample: Callable[..., Any] = import_implementation(settings.implementation)
    try:
        trees = list(sample(settings, problems, seeds, session, dialogue))
    except RlxError:  # of the session, which names its cause
        raise
    except Exception as error:
        raise _build_fault(settings, f"{type(error).__name__}: {error}") from error
    if [getattr(tree, "problem", None) for tree in trees] != list(problems):
        raise _build_fault(settings, "it does not return one RolloutTree per problem, in order")
    for tree in trees:
        _check_turns(settings, tree)
    return trees


def _check_turns(settings: Schedule, tree: RolloutTree) -> None:
    found = Counter(segment.kind for segment in tree.segments if segment.author == "policy")
    if unknown := found.keys() - set(settings.turns):
        kinds = ", ".join(settings.turns)
        raise _build_fault(settings, f"a turn has the kind {min(unknown)!r}, not one of {kinds}")
    most = 1
    for level in settings.list_levels():
        most *= level.count
        if found[level.kind] > most:
            what = f"a tree has {found[level.kind]} turns {level.kind!r}, not {most}"
            raise _build_fault(settings, what)


def _build_fault(settings: Schedule, what: str) -> PluginError:
    return PluginError(f"schedule plugin {settings.schedule!r} failed to sample: {what}")
