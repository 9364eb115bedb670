"""Every value that a stated confidence can have, as branches of the rows that state one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from rlx.errors import SpecError
from rlx.learner.pack import Branches
from rlx.train_batch import TrainBatch

__all__ = ["ConfidenceBranches", "Encoder", "build_confidence_branches", "encode_confidences"]


class Encoder(Protocol):
    """What a dialogue format knows about its tokenizer."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text."""
        ...

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Returns the text, and how many characters are decoded after every token."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class ConfidenceBranches:
    """The branches of a step's confidences: one per row and value.

    Attributes:
        branches: `R` continuations.
        scores: `[R]` score of the value under the row's label.
        weights: `[R]` weight of the row in the loss.
        values: number of values of a row.
    """

    branches: Branches
    scores: Tensor
    weights: Tensor
    values: int


def encode_confidences(
    values: Sequence[str], span: str, encoder: Encoder
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each value after the opening tag of its span, none a prefix of another.

    The probability that a response states a value is the product of its tokens' probabilities. If
    the tokens of one value begin another's, as those of 0.8 begin 0.85, each is followed by the
    first token of the closing tag, which tells them apart.

    Args:
        values: the texts.
        span: name of their span.
        encoder: the model's dialogue format.

    Raises:
        SpecError: the vocabulary lacks a part of a value, joins it with its tags in one token, or
            does not tell two values apart.
    """
    opening, closing = f"<{span}>", f"</{span}>"
    encoded = [_encode_between(opening, text, closing, encoder) for text in values]
    tokens = [inside for inside, _ in encoded]
    if not _is_prefix_free(tokens):
        tokens = [(*inside, after) for inside, after in encoded]
    if not _is_prefix_free(tokens):
        raise SpecError(
            f"loss.expected: this model's tokenizer does not tell the values of <{span}> apart: "
            f"{', '.join(values)}"
        )
    return tuple(tokens)


def _encode_between(
    opening: str, text: str, closing: str, encoder: Encoder
) -> tuple[tuple[int, ...], int]:
    """The tokens of a text between two tags, and the token that follows them."""
    ids = encoder.encode(f"{opening}{text}{closing}")
    _, ends = encoder.read(ids)
    first, last = len(opening), len(opening) + len(text)
    if first not in ends or last not in ends:
        raise SpecError(
            f"loss.expected: this model's tokenizer joins {text!r} with a tag around it in one "
            "token, so the tag's end is no place where the model chooses a confidence"
        )
    begin, stop = ends.index(first) + 1, ends.index(last) + 1
    return ids[begin:stop], ids[stop]


def _is_prefix_free(sequences: Sequence[tuple[int, ...]]) -> bool:
    """Whether no sequence begins another, or equals it."""
    ordered = sorted(sequences)
    return all(longer[: len(shorter)] != shorter for shorter, longer in pairwise(ordered))


def build_confidence_branches(
    train: TrainBatch, tokens: Sequence[tuple[int, ...]]
) -> ConfidenceBranches | None:
    """The branches of a batch; None if no confidence has a weight in the loss.

    Args:
        train: a batch whose loss has an expected score.
        tokens: from `encode_confidences`, in the order of `train.expected.values`.
    """
    expected = train.expected
    if expected is None:
        return None
    weights = expected.coefficient * train.weights[expected.rows, expected.starts]
    weighs = weights != 0
    if not weighs.any():
        return None
    rows, starts, count = expected.rows[weighs], expected.starts[weighs], len(tokens)
    return ConfidenceBranches(
        branches=Branches(
            rows=rows.repeat_interleave(count),
            starts=starts.repeat_interleave(count),
            tokens=tuple(tokens) * len(rows),
        ),
        scores=torch.as_tensor(expected.scores[weighs].flatten()),
        weights=weights[weighs].repeat_interleave(count),
        values=count,
    )
