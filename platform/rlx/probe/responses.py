"""Responses assembled from given and sampled tokens, in the form that rewards score."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, Completion, RolloutTree, Segment, TurnLevel, find_spans

__all__ = ["AssembledResponse", "build_response_tree", "truncate_completion"]


@dataclass(frozen=True, slots=True)
class AssembledResponse:
    """A response of given and sampled tokens.

    Attributes:
        token_ids: its tokens, given or sampled; rewards see their number.
        text: the text that is scored.
        finish_reason: "length" if the token limit ended it.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]


def truncate_completion(completion: Completion, room: int) -> Completion:
    """Truncates a completion to `room` tokens, at least one, as if sampled with that budget."""
    room = max(room, 1)
    if len(completion.token_ids) <= room:
        return completion
    return Completion(completion.token_ids[:room], completion.logprobs[:room], "length")


def build_response_tree(
    problem: Problem,
    prompt_ids: tuple[int, ...],
    level: TurnLevel,
    written: Sequence[AssembledResponse],
) -> RolloutTree:
    """Builds a tree of responses to one prompt, for scoring only, never for training.

    Args:
        problem: the problem.
        prompt_ids: tokens before the responses; no reward reads them.
        level: kind of turn of the responses, and the spans it declares.
        written: the responses; rewards that compare treat them as one group.

    Returns:
        A tree whose segment i + 1 is response i.
    """
    root = Segment(parent=NO_PARENT, author="prompt", token_ids=prompt_ids)

    def build_turn_segment(response: AssembledResponse) -> Segment:
        text = response.text
        return Segment(
            parent=0,
            author="policy",
            token_ids=response.token_ids,
            logprobs=(0.0,) * len(response.token_ids),
            turn=1,
            kind=level.kind,
            finish_reason=response.finish_reason,
            text=text,
            spans=find_spans(text, range(1, len(text) + 1), level.turn.spans),
        )

    return RolloutTree(problem, (root, *map(build_turn_segment, written)))
