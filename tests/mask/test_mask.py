"""Which tokens learn."""

import bound
import token_trees
from rows import each_row

from rlx.batch import build_token_batch
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree, Segment


def turn(parent, length, **more):
    """A turn of so many tokens, whose spans are tuples of two numbers."""
    spans = {name: (own, own) for name, own in more.items() if name not in NAMED}
    return token_trees.turn(parent, *range(1, length + 1), **more | spans)


NAMED = ("kind", "number", "reason", "hull")


def masks(*turns, parents=None, **options):
    """The mask of each turn's own tokens, the turns hanging below a prompt of two tokens."""
    prompt = Segment(parent=NO_PARENT, author="prompt", token_ids=(8, 9))
    tree = RolloutTree(Problem(id="p", prompt="", fields={}), (prompt, *turns))
    batch = build_token_batch([tree])
    mask = bound.mask("turn_spans", **options)(batch)
    assert mask.dtype == batch.is_own.dtype and mask.shape == batch.is_own.shape
    assert not (mask & ~batch.is_own).any(), "a token learns that is not the row's own"
    return [
        "".join("x" if m else "." for m in row[own])
        for row, own in zip(mask, batch.is_own, strict=True)
    ]


CASES = [
    # a turn of 8 tokens, the last of which ends it             default     no eos
    ({"think": (0, 3), "answer": (4, 6)}, "stop", "xxx.xx.x", "xxx.xx.."),
    ({"think": (0, 3), "answer": (4, 6)}, "length", "xxx.xx..", "xxx.xx.."),
    ({"answer": (2, 8)}, "stop", "..xxxxxx", "..xxxxxx"),
    ({"think": (1, 5), "answer": (3, 6)}, "length", ".xxxxx..", ".xxxxx.."),
    ({"answer": (4, 4)}, "stop", "xxxxxxxx", "xxxxxxxx"),
    ({}, "stop", "xxxxxxxx", "xxxxxxxx"),
    ({}, "length", "xxxxxxxx", "xxxxxxxx"),
]


@each_row(("spans", "reason", "default", "without_eos"), CASES)
def test_worked_example(spans, reason, default, without_eos):
    # The row below has spans, so that the batch knows their names.
    one, other = turn(0, 8, reason=reason, **spans), turn(0, 3, think=(0, 1), answer=(1, 2))
    assert masks(one, other) == [default, "xxx"]
    assert masks(one, other, include_eos=False) == [without_eos, "xx."]


def test_without_a_fallback_a_row_without_spans_does_not_learn_at_all():
    found, lost = turn(0, 3, answer=(0, 1)), turn(0, 4)
    assert masks(found, lost, fallback="none") == ["x.x", "...."]
    assert masks(found, lost, fallback="none", include_eos=False) == ["x..", "...."]


def test_a_batch_in_which_no_span_was_found():
    assert masks(turn(0, 2), turn(0, 3)) == ["xx", "xxx"]
    assert masks(turn(0, 2), turn(0, 3), fallback="none") == ["..", "..."]


def test_the_answer_does_not_learn_from_the_row_of_its_confidence():
    question = Segment(parent=1, author="prompt", token_ids=(5,))
    confidence = turn(2, 4, kind="confidence", number=2, confidence=(1, 3))
    assert masks(turn(0, 3, answer=(0, 2)), question, confidence) == ["xxx", ".xxx"]


@each_row(
    "first, last, options, expected",
    [
        ({}, {"answer": (0, 2)}, {}, "xxx" + "xx.x"),
        ({"answer": (0, 2)}, {}, {}, "xxx" + "xxxx"),
        ({"answer": (0, 1)}, {"answer": (0, 2)}, {}, "x.x" + "xx.x"),
        ({}, {}, {}, "xxx" + "xxxx"),
        ({}, {"answer": (0, 2)}, {"fallback": "none"}, "..." + "xx.x"),
        ({"answer": (0, 1)}, {}, {"fallback": "none"}, "x.x" + "...."),
        ({}, {"answer": (0, 2)}, {"include_eos": False}, "xxx" + "xx.."),
        ({}, {"hull": (1, 3)}, {"hull": True}, "xxx" + ".xxx"),
    ],
)
def test_observations_do_not_learn_and_every_turn_of_a_row_has_its_own_spans(
    first, last, options, expected
):
    """A turn that breaks the form is corrected, though another turn of its row keeps it."""
    seen = Segment(parent=1, author="environment", token_ids=(5, 6))
    row = turn(0, 3, kind="query", **first), seen, turn(2, 4, number=2, **last)
    assert masks(*row, **options) == [expected]


@each_row(
    ("hull", "joined", "default"),
    [((1, 6), ".xxxxx..", ".xx.xx.x"), ((1, 8), ".xxxxxxx", ".xx.xx.x"), (None, "." * 8, "." * 8)],
)
def test_the_hull_joins_the_spans(hull, joined, default):
    spans = {"think": (1, 3), "answer": (4, 6)} if hull else {}
    rows = turn(0, 8, hull=hull, **spans), turn(0, 3, hull=(0, 3), think=(0, 1), answer=(1, 2))
    literal = {"fallback": "none", "include_eos": False}
    assert masks(*rows, hull=True, **literal) == [joined, "xxx"]
    assert masks(*rows, fallback="none")[0] == default


def test_a_row_without_a_hull_falls_back():
    rows = turn(0, 4, hull=(0, 2)), turn(0, 4)
    assert masks(*rows, hull=True) == ["xx.x", "xxxx"]


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
    row = turn(0, 2, reason="length"), seen, turn(2, 3, number=2)
    assert list_learning_rows(name, *row) == [False]
