"""Turns for trees made by hand."""

from rlx.rollout import Segment, Span


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
