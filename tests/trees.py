"""Turns and trees made by hand."""

from rlx.plugin import Problem
from rlx.reward import RewardEntry
from rlx.rollout import NO_PARENT, RolloutTree, Segment, Span


def turn(parent, text="", *, kind="answer", number=1, info=None, **spans):
    """A turn of one token; `spans` are the texts of its named spans."""
    return Segment(
        parent=parent,
        author="policy",
        token_ids=(1,),
        logprobs=(0.0,),
        turn=number,
        kind=kind,
        finish_reason="stop",
        text=text,
        spans={name: Span((0, 1), (0, 1), inside) for name, inside in spans.items()},
        info=info or {},
    )


def asked(parent=NO_PARENT, text=""):
    """A prompt of one token."""
    return Segment(parent=parent, author="prompt", token_ids=(1,), text=text)


def tree(*segments, name="p", fields=None, **more):
    """A tree of a prompt of one token, and of segments that follow it."""
    problem = Problem(id=name, prompt="?", fields=fields or {}, **more)
    return RolloutTree(problem, (asked(), *segments))


def entry(name, raw, weight=1.0, **parts):
    """A reward's value, None where it is absent."""
    return RewardEntry(name, raw, weight, "absent" if raw is None else "scored", None, parts)


def conversation(*rollouts, problem=None):
    """A tree of rollouts with an environment, in which a token is a character.

    Args:
        rollouts: each a list of turns `(kind, text, info, observation)`; a rollout that was cut off
            ends with an observation, one that was done with None.
        problem: what was asked.
    """
    segments = [Segment(parent=NO_PARENT, author="prompt", token_ids=(63,), text="?")]
    for rollout in rollouts:
        parent = 0
        for number, (kind, text, info, observation) in enumerate(rollout, start=1):
            segments.append(_spoken(parent, number, kind, text, info))
            parent = len(segments) - 1
            if observation is not None:
                segments.append(_observed(parent, observation))
                parent = len(segments) - 1
    return RolloutTree(problem or Problem(id="p", prompt="?", fields={}), tuple(segments))


def _spoken(parent, number, kind, text, info):
    return Segment(
        parent=parent,
        author="policy",
        token_ids=tuple(map(ord, text)),
        logprobs=(-0.5,) * len(text),
        turn=number,
        kind=kind,
        finish_reason="stop",
        text=text,
        info=info,
    )


def _observed(parent, text):
    ids = tuple(map(ord, text))
    return Segment(parent=parent, author="environment", token_ids=ids, text=text)
