"""Responses that were put together rather than sampled whole, as rewards see them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, Completion, RolloutTree, Segment, TurnLevel, find_spans

__all__ = ["AssembledResponse", "build_response_tree", "truncate_completion"]


@dataclass(frozen=True, slots=True)
class AssembledResponse:
    """A response.

    Attributes:
        token_ids: its tokens, given or sampled; rewards see how many they are.
        text: what it says, as it is scored.
        finish_reason: "length" where the model would have gone on.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]


def truncate_completion(completion: Completion, room: int) -> Completion:
    """A continuation as it would have been with a budget of `room` tokens, at least one."""
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
    """Responses to one prompt as turns of a tree, to be scored as any are; never to be trained on.

    Args:
        problem: what was asked.
        prompt_ids: tokens before the responses; no reward reads them.
        level: what kind of turn they are, and which spans it declares.
        written: the responses, one group to rewards that compare.

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
