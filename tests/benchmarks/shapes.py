"""Trees of two turns whose every length is fixed, and the batch that is learned from them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.batch import TokenBatch, build_token_batch
from rlx.credit import Credit
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx.spec import CreditSpec, LossSpec
from rlx.step import assign_credit
from rlx.train_batch import CreditRules, ScoredRows, TokenStreams, TrainBatch

__all__ = ["LONG", "LOSS", "SHORT", "Shape", "train_batch"]

LOSS = LossSpec()


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of every segment, and how many there are."""

    prompts: int
    prompt: int
    answer: int
    question: int
    confidence: int
    answers: int
    confidences: int

    @property
    def longest(self) -> int:
        """Tokens of a row that ends with a confidence."""
        return self.prompt + self.answer + self.question + self.confidence


SHORT = Shape(4, 100, 60, 30, 12, answers=8, confidences=4)
LONG = Shape(1, 200, 300, 30, 20, answers=8, confidences=8)


def train_batch(shape: Shape, vocabulary: int) -> TrainBatch:
    """Random tokens with random advantages; every token that the policy wrote learns."""
    generator = torch.Generator().manual_seed(0)
    trees = [_tree(shape, n, vocabulary, generator) for n in range(shape.prompts)]
    batch = build_token_batch(trees)
    mask = batch.is_own
    old = -torch.rand(mask.shape, generator=generator) - 4
    none = torch.zeros(len(mask), 2)
    return assign_credit(
        ScoredRows.join(
            batch, mask, turn_rewards=none, turn_present=none.bool(), global_rewards=none[:, 0]
        ),
        TokenStreams(old_logprobs=old),
        CreditRules(
            estimator=lambda _: Credit(advantages=_advantages(batch, generator) * mask),
            credit=CreditSpec(),
            loss=LOSS,
            max_tokens={"answer": shape.answer, "confidence": shape.confidence},
        ),
    )


def _advantages(batch: TokenBatch, generator: torch.Generator) -> Tensor:
    return torch.randn(len(batch.rows), 1, generator=generator)


def _tree(shape: Shape, number: int, vocabulary: int, generator: torch.Generator) -> RolloutTree:
    def drawn(length: int) -> tuple[int, ...]:
        ids: list[int] = torch.randint(4, vocabulary, (length,), generator=generator).tolist()
        return tuple(ids)

    def turn(parent: int, turn: int, kind: str, length: int) -> Segment:
        return Segment(
            parent=parent,
            author="policy",
            token_ids=drawn(length),
            turn=turn,
            kind=kind,
            logprobs=(-4.6,) * length,
        )

    segments = [Segment(parent=NO_PARENT, author="prompt", token_ids=drawn(shape.prompt))]
    question = drawn(shape.question)
    for _ in range(shape.answers):
        segments.append(turn(0, 1, "answer", shape.answer))
        segments.append(Segment(parent=len(segments) - 1, author="prompt", token_ids=question))
        asked = len(segments) - 1
        segments += [
            turn(asked, 2, "confidence", shape.confidence) for _ in range(shape.confidences)
        ]
    return RolloutTree(Problem(id=str(number), prompt="", fields={}), tuple(segments))
