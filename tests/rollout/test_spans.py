"""Named spans, from text to tokens."""

import hypothesis.strategies as st
from hypothesis import given, settings
from rows import each_row

from rlx.rollout import Span, find_hull, find_spans

TAGS = ("think", "answer")


def cut(*pieces):
    """Text and ends of a turn whose tokens are `pieces`."""
    ends, total = [], 0
    for piece in pieces:
        ends.append(total := total + len(piece))
    return "".join(pieces), ends


def by_bytes(data, cuts):
    """Text and ends of a turn whose tokens are stretches of bytes, as a byte-level BPE has it."""
    borders = sorted({*cuts, len(data)} - {0})
    ends = [len(data[:b].decode("utf-8", errors="ignore")) for b in borders]
    return data.decode(), ends, borders


CASES = {
    "one_token_per_tag": (
        ["<think>", "hm", "</think>", "<answer>", "42", "</answer>"],
        {"think": ((0, 3), (1, 2), "hm"), "answer": ((3, 6), (4, 5), "42")},
    ),
    "tokens_across_borders_belong_to_the_span": (
        ["so <ans", "wer>4", "2</", "answer> ok"],
        {"answer": ((0, 4), (1, 3), "42")},
    ),
    "one_token_holds_it_all": (
        ["a", "<answer>1</answer>", "b"],
        {"answer": ((1, 2), (1, 2), "1")},
    ),
    "the_last_closed_one_counts": (
        ["<answer>1</answer>", " or ", "<answer>", "2", "</answer>"],
        {"answer": ((2, 5), (3, 4), "2")},
    ),
    "an_open_tag_after_the_last_closed_one_does_not": (
        ["<answer>", "1", "</answer>", "<answer>", "2"],
        {"answer": ((0, 3), (1, 2), "1")},
    ),
    "nothing_inside": (["<answer>", "</answer>"], {"answer": ((0, 2), (1, 1), "")}),
    "think_may_have_been_opened_by_the_prompt": (
        ["so", " then", "</think>", "x"],
        {"think": ((0, 3), (0, 2), "so then")},
    ),
    "think_closed_at_once": (["</think>", "x"], {"think": ((0, 1), (0, 0), "")}),
    "answer_may_not": (["1", "</answer>"], {}),
    "never_closed": (["<think>", "hm", "<answer>", "1"], {}),
    "closed_before_it_is_opened": (["</answer>", "1", "<answer>"], {}),
    "other_names_are_nothing": (["<answers>", "1", "</answers>", "< answer>1</ answer>"], {}),
    "case_matters": (["<Answer>", "1", "</Answer>"], {}),
    "no_tokens": ([], {}),
}


@each_row("case", CASES, ids=str)
def test_worked_example(case):
    pieces, expected = CASES[case]
    found = find_spans(*cut(*pieces), TAGS)
    assert found == {name: Span(*span) for name, span in expected.items()}


def test_later_turns_do_not_start_inside_think():
    text, ends = cut("hm", "</think>")
    assert "think" in find_spans(text, ends, TAGS, first_turn=True)
    assert find_spans(text, ends, TAGS, first_turn=False) == {}


HULLS = {
    "from the first span to the last": (
        ["so ", "<think>", "a", "</think>", " thus ", "<answer>", "b", "</answer>", "!", ""],
        (1, 8),
    ),
    "the answer is not closed": (["<think>", "a", "</think>", "<answer>", "b", ""], (0, 6)),
    "no answer at all": (["so ", "<think>", "a", "</think>", "b", ""], (1, 6)),
    "think is not closed": (["<think>", "a", "<answer>", "b", "</answer>", ""], (0, 5)),
    "think was opened by the prompt": (["a", "</think>", "<answer>", "b", "</answer>"], (0, 5)),
    "without think": (["so ", "<answer>", "b", "</answer>", "!", ""], (1, 4)),
    "nothing is opened": (["so ", "b", "</answer>", ""], None),
    "the answer is closed before think is opened": (
        ["<answer>", "b", "</answer>", "<think>", "a", ""],
        (3, 6),
    ),
    "no tokens": ([], None),
}


@each_row("case", HULLS, ids=str)
def test_worked_hull(case):
    pieces, expected = HULLS[case]
    assert find_hull(*cut(*pieces), TAGS) == expected


def test_the_analysis_is_optional():
    names = ("analysis", "confidence")
    stated = ["well ", "<confidence>", "1", "</confidence>", ""]
    assert find_hull(*cut(*stated), names) == (1, 4)
    checked = ["<analysis>", "a", "</analysis>", " so ", *stated]
    assert find_hull(*cut(*checked), names) == (0, 8)


def test_a_later_turn_that_only_closes_think_opens_nothing():
    assert find_hull(*cut("a", "</think>"), TAGS, first_turn=False) is None


@given(st.lists(st.sampled_from(["a", *(f"<{n}>" for n in TAGS), *(f"</{n}>" for n in TAGS)])))
def test_a_hull_covers_the_spans_that_follow_its_start(pieces):
    text, ends = cut(*pieces)
    hull, spans = find_hull(text, ends, TAGS), find_spans(text, ends, TAGS)
    if hull is None:
        assert spans == {}
        return
    first, last = hull
    assert 0 <= first < last <= len(pieces)
    if "answer" in spans and spans["answer"].outer[0] >= first:
        assert spans["answer"].outer[1] <= last


def test_the_first_byte_counts_where_the_turn_starts_inside_think():
    text, ends, _ = by_bytes("é</think>".encode(), range(10))
    assert find_spans(text, ends, TAGS)["think"] == Span((0, 10), (0, 2), "é")


letters = st.text("aé漢😀<>/", max_size=6)


@settings(deadline=None)
@given(letters, letters, letters, st.sets(st.integers(1, 60)))
def test_spans_cover_exactly_the_tokens_that_hold_their_bytes(before, inside, after, cuts):
    """However bytes are cut into tokens. The oracle works on bytes and never sees `ends`."""
    data = f"{before}<answer>{inside}</answer>{after}".encode()
    text, ends, borders = by_bytes(data, {c for c in cuts if c < len(data)})
    span = find_spans(text, ends, ["answer"])["answer"]

    def touching(start, stop):
        starts = [0, *borders[:-1]]
        return [
            i
            for i, (a, b) in enumerate(zip(starts, borders, strict=True))
            if start < stop and a < stop and b > start
        ]

    open_at = len(before.encode())
    inner_at = open_at + len("<answer>")
    inner_end = inner_at + len(inside.encode())
    assert span.text == inside
    assert list(range(*span.outer)) == touching(open_at, inner_end + len("</answer>"))
    inner, crossing = set(range(*span.inner)), touching(inner_at - 1, inner_at + 1)
    # A token that closes the tag and begins a character counts with the tag if it completes no
    # more than that: lengths in characters cannot tell it from one that ends with the tag.
    assert set(touching(inner_at, inner_end)) - inner <= set(crossing[:1])
    assert inner <= set(touching(inner_at, inner_end))
    if data.isascii():
        assert inner == set(touching(inner_at, inner_end))
    assert text[: len(before)] == before


@settings(deadline=None)
@given(st.text("<think>/answer é", max_size=60), st.sets(st.integers(1, 60)))
def test_any_text_gives_ranges_inside_the_turn(text, cuts):
    borders = sorted({c for c in cuts if c < len(text)} | {len(text)})
    ends = borders if text else []
    for span in find_spans(text, ends, TAGS).values():
        (a, b), (c, d) = span.outer, span.inner
        assert 0 <= a <= c <= d <= b <= len(ends)
        assert a < b
        assert span.text in text
