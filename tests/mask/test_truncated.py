"""`truncated: skip`: rows in which a turn ran out of tokens do not learn."""

import bound
from rows import each_row

from rlx.batch import build_token_batch
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree, Segment


def turn(parent, length, *, number=1, reason="stop"):
    return Segment(
        parent=parent,
        author="policy",
        token_ids=tuple(range(1, length + 1)),
        logprobs=(-1.0,) * length,
        turn=number,
        kind="answer",
        finish_reason=reason,
    )


def list_learning_rows(name, *segments):
    """Which rows have a token in the mask, the rows hanging below a prompt of two tokens."""
    prompt = Segment(parent=NO_PARENT, author="prompt", token_ids=(8, 9))
    tree = RolloutTree(Problem(id="p", prompt="", fields={}), (prompt, *segments))
    mask = bound.mask(name, truncated="skip")(build_token_batch([tree]))
    return mask.any(dim=1).tolist()


@each_row("name", ["model_tokens", "turn_spans"])
@each_row(
    ("long", "short", "learn"),
    [
        ("length", "stop", [False, True]),
        ("stop", "length", [True, False]),
        ("length", "length", [False, False]),
        ("stop", "stop", [True, True]),
    ],
)
def test_a_truncated_row_is_skipped_whether_or_not_it_is_the_longest(name, long, short, learn):
    """The longest row has no padding, so its last token is the last column of the batch."""
    assert list_learning_rows(name, turn(0, 5, reason=long), turn(0, 2, reason=short)) == learn


@each_row("name", ["model_tokens", "turn_spans"])
def test_one_truncated_turn_skips_the_whole_row(name):
    seen = Segment(parent=1, author="environment", token_ids=(5,))
    assert list_learning_rows(name, turn(0, 2, reason="length"), seen, turn(2, 3, number=2)) == [
        False
    ]
