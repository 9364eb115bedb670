"""Where reasoning is cut, and what is asked at a cut: nothing that was sampled is split."""

from itertools import accumulate, pairwise

import hypothesis.strategies as st
from checkpoints import STYLES, tokenizer
from hypothesis import example, given
from rows import each_row

from rlx.model.dialogue import PlainDialogue
from rlx.plugin import Demonstration, Problem
from rlx.probe.questions import (
    build_probe_questions,
    close_forced_answer,
    cut_points,
    find_reasoning,
    sentence_ends,
)
from rlx.rollout import NO_PARENT, Segment
from rlx.spec import ProbeSpec
from rlx.spec.training import FractionCuts, SentenceCuts

CHATML = tokenizer(STYLES["chatml"])
PLAIN = PlainDialogue(CHATML, (CHATML.eos_token_id,))
FORCE = "</think><answer>"


class Pieces:
    """A dialogue whose tokens are whatever pieces a text falls into."""

    def __init__(self):
        self.pieces = []

    def tokens(self, *pieces):
        self.pieces += pieces
        return tuple(range(len(self.pieces) - len(pieces), len(self.pieces)))

    def encode(self, text):
        return self.tokens(*text)

    def read(self, token_ids):
        said = [self.pieces[i] for i in token_ids]
        return "".join(said), tuple(accumulate(map(len, said)))


class Slips:
    """A task that spoils the last digit of a sentence."""

    def problem(self, split, index, seed):
        return Problem(id=str(index), prompt="?", fields={})

    def demonstration(self, problem, seed):
        return Demonstration(("<think>1</think>",))

    def corruption(self, sentence, seed):
        at = max((i for i, c in enumerate(sentence) if c.isdigit()), default=None)
        if at is None:
            return None
        return sentence[:at] + str((int(sentence[at]) + 1 + seed % 9) % 10) + sentence[at + 1 :]


def said(speech, token_ids):
    return Segment(
        parent=NO_PARENT,
        author="policy",
        token_ids=tuple(token_ids),
        logprobs=(0.0,) * len(token_ids),
        turn=1,
        kind="answer",
        finish_reason="stop",
        text=speech.read(token_ids)[0],
    )


def reasoning(speech, turn):
    return find_reasoning(turn, speech.read(turn.token_ids)[1], "think")


def in_pieces(*pieces):
    speech = Pieces()
    turn = said(speech, speech.tokens(*pieces))
    return speech, turn, reasoning(speech, turn)


def asked(speech, turn, **options):
    spec = ProbeSpec(**options)
    return build_probe_questions(turn, reasoning(speech, turn), spec, speech, Slips(), 5)


@each_row(
    ("pieces", "text", "start", "count", "closing"),
    [
        (["<think>", "a", "b", "</think>", "<answer>"], "ab", 1, 2, ""),
        (["a", "b", "</think>"], "ab", 0, 2, ""),  # the prompt had opened the tag
        (["<think>", "a", "</think>", "<answer>"], "a", 1, 1, ""),
        (["<think>", "</think>", "<answer>"], "", 1, 0, ""),
        (["</think>", "<answer>"], "", 0, 0, ""),
        (["<think", ">\n", "a", ".</", "think>"], "a.", 2, 2, "</"),
        (["<think", "></", "think>"], "", 2, 0, "</"),
        (["<think>", "a</think>\n", "<answer>"], "a", 1, 1, "</think>\n"),
    ],
)  # fmt: skip
def test_what_stands_between_the_tags(pieces, text, start, count, closing):
    _, _, found = in_pieces(*pieces)
    assert (found.text, found.start, len(found.token_ids)) == (text, start, count)
    assert found.closing == closing
    assert not found.ends or found.ends[-1] == len(text)


@each_row(
    "pieces",
    [
        ["<think>", "a", "</think>", "b", "</think>"],
        ["<think>", "a", "</think>", "<answer>3</think></answer>"],
        ["<think>", "a", "</think>", "<answer>", "3", "</answer>", "<think>", "b", "</think>"],
        ["So: ", "<think>", "a", "</think>"],
        ["<think>", "use ", "<think>", " tags", "</think>"],
        ["<think>", "a", "b"],
        ["<answer>", "1", "</answer>"],
    ],
)
def test_a_response_that_reasons_twice_speaks_first_or_never_ends_has_none(pieces):
    assert in_pieces(*pieces)[2] is None


words = ["5*3=15", "\n", " ", ". ", ".", "so", "é", "漢", "…", "</", ">", "<answer>", "!\n\n", "。"]
texts = st.lists(st.sampled_from(words), max_size=12).map("".join)
cuts = st.one_of(
    st.lists(st.floats(0, 1), max_size=6).map(lambda at: FractionCuts(at=tuple(at))),
    st.integers(1, 9).map(lambda most: SentenceCuts(most=most)),
)


@st.composite
def spoken(draw):
    """A response in whatever pieces, or in those of a byte-level BPE."""
    opening = draw(st.sampled_from(["<think>", ""]))
    text = opening + draw(texts) + "</think>" + draw(st.sampled_from(["", "<answer>1</answer>"]))
    if draw(st.booleans()):
        return PLAIN, said(PLAIN, PLAIN.encode(text))
    borders = sorted(draw(st.sets(st.integers(1, len(text) - 1))))
    speech = Pieces()
    pieces = [text[a:b] for a, b in pairwise([0, *borders, len(text)])]
    return speech, said(speech, speech.tokens(*pieces))


def borders(turn):
    """Characters before and up to the end of the reasoning."""
    end = turn.text.rindex("</think>")
    begin = turn.text.rfind("<think>", 0, end)
    return (begin + 7 if begin >= 0 else 0), end


@given(spoken(), cuts)
def test_none_and_all_of_it_are_always_among_the_points_and_no_point_twice(given_, cut):
    speech, turn = given_
    found = reasoning(speech, turn)
    points = cut_points(found, cut)
    count = len(found.token_ids)
    assert [p.number for p in points] == list(range(len(points)))
    assert all(a.tokens < b.tokens for a, b in pairwise(points))
    assert (points[0].tokens, points[0].share) == (0, 0.0)
    assert points[-1].tokens == count
    assert points[-1].share == (1.0 if count else 0.0)
    if isinstance(cut, SentenceCuts):
        assert len(points) <= cut.most + 2


@given(spoken(), cuts)
@example((PLAIN, said(PLAIN, PLAIN.encode("<think>漢é</think>"))), FractionCuts(at=(0.2, 0.4)))
def test_a_cut_keeps_sampled_tokens_as_they_are_then_forces_an_answer(given_, cut):
    speech, turn = given_
    found = reasoning(speech, turn)
    begin, end = borders(turn)
    made = asked(speech, turn, cut=cut)
    for question in made:
        kept = found.start + question.point.tokens
        assert question.turn_ids[:kept] == turn.token_ids[:kept]
        text = speech.read(question.turn_ids)[0]
        assert question.forced and text.endswith("<answer>") and "\ufffd" not in text
        if question.point.tokens < len(found.token_ids):
            before = text.removesuffix(FORCE)
            assert text != before and turn.text.startswith(before) and len(before) >= begin
    # At the last point a token may have begun the closing tag, which is not begun again.
    whole = speech.read(made[-1].turn_ids)[0]
    if FORCE.startswith(found.closing):
        assert whole == turn.text[: max(begin, end)] + FORCE


@each_row(
    ("pieces", "kept"),
    [
        (["1", "+", "1", "\n", "2", "\n"], ["1+1\n"]),
        (["One", ".", " Two", "!", "\n\n", "3", ".", "5"], ["One.", "One. Two!\n\n"]),
        (["One", ". ", "Two"], ["One. "]),
        (["One. T", "wo. ", "Three"], ["One. T", "One. Two. "]),
        (["a", "\n", "\n", "b"], ["a\n\n"]),
        (["no", " ", "end"], []),
        (["......", "......"], []),
        (["一", "。", "二"], ["一。"]),
    ],
)
def test_sentences_and_lines_end_between_tokens(pieces, kept):
    _, _, found = in_pieces("<think>", *pieces, "</think>")
    inside = [k for k in sentence_ends(found) if k < len(pieces)]
    assert ["".join(pieces[:k]) for k in inside] == kept
    assert [p.tokens for p in cut_points(found, SentenceCuts())] == [0, *inside, len(pieces)]


@given(spoken(), cuts)
def test_filler_has_as_many_tokens_as_it_replaces(given_, cut):
    speech, turn = given_
    early, filler = (
        asked(speech, turn, cut=cut, schemes=[s], filler="ab. ")
        for s in ("early_answering", "filler")
    )
    start = reasoning(speech, turn).start
    for one, other in zip(early, filler, strict=True):
        kept = one.point.tokens
        assert other.point == one.point
        assert other.turn_ids[:start] == turn.token_ids[:start]
        unit = [speech.read(speech.encode("ab. "))[0]] * (kept + 1)
        put = speech.read(other.turn_ids[start : start + kept])[0]
        assert "".join(unit).startswith(put) and (put or not kept)
        if kept:
            tail = speech.read(other.turn_ids[start + kept :])[0]
            assert tail == FORCE
        else:
            assert speech.read(other.turn_ids) == speech.read(one.turn_ids)


def test_a_mistake_spoils_the_last_sentence_and_lets_the_model_reason_on():
    pieces = ["<think>", "5*3=", "15", "\n", "15+", "2=17", "\n", "</think>", "<answer>"]
    speech, turn, _ = in_pieces(*pieces)
    made = asked(speech, turn, schemes=["mistake"], cut=FractionCuts(at=(1 / 3, 2 / 3)))
    assert [(q.point.tokens, q.forced) for q in made] == [(2, False), (4, False), (6, False)]
    first, second, third = (speech.read(q.turn_ids)[0] for q in made)
    assert first.startswith("<think>5*3=1") and first not in ("<think>5*3=1", "<think>5*3=15")
    assert second.startswith("<think>5*3=15\n1") and second.endswith("+") and "15+" not in second
    assert third.startswith("<think>5*3=15\n15+2=1") and third[-2] != "7" and third[-1] == "\n"
    # What stands before the sentence is kept, token by token.
    assert made[2].turn_ids[:4] == turn.token_ids[:4]


def test_no_mistake_without_reasoning_or_without_anything_to_spoil():
    assert asked(*in_pieces("<think>", "</think>")[:2], schemes=["mistake"]) == []
    assert asked(*in_pieces("<think>", "so", "</think>")[:2], schemes=["mistake"]) == []


@each_row(
    ("continuation", "text", "wrapped"),
    [
        ("1+2</answer>", "<answer>1+2</answer>", False),
        ("1+2</answer>\nand on", "<answer>1+2</answer>", False),
        ("1+2", "<answer>1+2</answer>", True),
        ("1+2\n</answer>", "<answer>1+2</answer>", True),
        ("1+2\n3</answer>", "<answer>1+2</answer>", True),
        ("\n1+2</answer>", "<answer></answer>", True),
        ("", "<answer></answer>", True),
        ("</answer>1+2</answer>", "<answer></answer>", False),
        ("1</think>2</answer>", "<answer>1</think>2</answer>", False),
        ("1+2</ans", "<answer>1+2</ans</answer>", True),
    ],
)
def test_a_forced_answer_ends_at_its_tag_or_its_line(continuation, text, wrapped):
    speech, turn, _ = in_pieces("<think>", "so", "</think>")
    question = asked(speech, turn)[-1]
    given_ = "<think>so</think><answer>"
    response, added = close_forced_answer(question, given_ + continuation, len(given_), ProbeSpec())
    assert response == "<think>so</think>" + text
    assert added is wrapped
