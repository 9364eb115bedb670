"""Segments of trees made by hand, by their tokens; `trees.py` makes them by their texts."""

from rlx.rollout import Segment, Span


def prompt(parent, *ids, text=""):
    return Segment(parent=parent, author="prompt", token_ids=ids, text=text)


def seen(parent, *ids, **info):
    """What an environment answers."""
    return Segment(parent=parent, author="environment", token_ids=ids, info=info)


def turn(parent, *ids, kind="answer", number=1, reason="stop", hull=None, **spans):
    """A turn of the policy; `spans` are the outer and inner hulls of its named spans."""
    return Segment(
        parent=parent,
        author="policy",
        token_ids=ids,
        logprobs=tuple(-i / 8 for i in ids),
        turn=number,
        kind=kind,
        finish_reason=reason,
        spans={name: Span(outer, inner, "") for name, (outer, inner) in spans.items()},
        hull=hull,
    )
