"""Growing trees with a sampler that is a hash and a tokenizer that is the character set."""

import hypothesis.strategies as st
import pytest
import speech
from hypothesis import given, settings
from speech import BEGIN, END, Characters

from rlx.plugin import Problem, WorkedExample
from rlx.rollout import (
    NO_PARENT,
    build_rollout_plan,
    sample_rollout_trees,
)
from rlx.seeding import derive_seed
from rlx.spec import SingleRolloutSpec, TurnSpec, TwoTurnRolloutSpec

ANSWERS = ("<think>a</think><answer>1</answer>", "<answer>2</answer>", "nothing", "é</think>ü")
CONFIDENCES = ("<confidence>0.5</confidence>", "hm</think><confidence>1</confidence>", "sure")


class Hashing(speech.Hashing):
    """Answers and confidences."""

    def __init__(self):
        super().__init__(ANSWERS)

    def texts(self, sampling):
        return CONFIDENCES if "confidence" in sampling.spans else ANSWERS


def problem(name):
    return Problem(id=name, prompt=f"{name}?", fields={"answer": name})


single = SingleRolloutSpec(num_generations_answer=3, answer=TurnSpec(template="Q: {prompt}\n"))
two_turn = TwoTurnRolloutSpec(
    num_generations_answer=3,
    num_generations_confidence=2,
    answer=single.answer.model_copy(update={"spans": ("think", "answer")}),
    confidence=TurnSpec(template="sure of {prompt}\n", spans=("think", "confidence")),
)


def grown(spec, names, seeds, session=None):
    session = session or Hashing()
    return sample_rollout_trees(
        build_rollout_plan(spec), [problem(n) for n in names], seeds, session, Characters()
    )


def test_examples_and_prefixes_are_read_and_not_sampled():
    spec = two_turn.model_copy(
        update={
            "system": "S",
            "examples": (WorkedExample(user="one?", assistant="<answer>1</answer>"),),
            "answer": two_turn.answer.model_copy(update={"prefix": "<answer>"}),
            "confidence": two_turn.confidence.model_copy(update={"prefix": "<confidence>"}),
        }
    )
    session = Hashing()
    session.texts = lambda sampling: (f"7</{sampling.spans[-1]}>",)
    (tree,) = grown(spec, ["a"], [7], session)
    last = tree.path(len(tree.segments) - 1)
    prompt, answer, question, confidence = (tree.segments[i] for i in last)
    opening = "Sone?<answer>1</answer>Q: a?\n<answer>"
    assert "".join(map(chr, prompt.token_ids[1:])) == opening and prompt.text == "Q: a?\n"
    assert "".join(map(chr, question.token_ids)).endswith("sure of a?\n<confidence>")
    for turn, name in ((answer, "answer"), (confidence, "confidence")):
        own = "".join(map(chr, turn.token_ids)).rstrip(chr(END))
        assert turn.text == f"<{name}>{own}" and len(turn.logprobs) == len(turn.token_ids)
        assert not own.startswith("<")
        if turn.finish_reason == "stop":
            span = turn.spans[name]
            assert (span.text, span.inner, span.outer) == ("7", (0, 1), (0, len(own)))


def test_a_single_turn_is_a_prompt_and_its_answers():
    (tree,) = grown(single, ["a"], [7])
    assert [s.parent for s in tree.segments] == [NO_PARENT, 0, 0, 0]
    assert [s.author for s in tree.segments] == ["prompt"] + ["policy"] * 3
    assert [(s.kind, s.turn) for s in tree.segments[1:]] == [("answer", 1)] * 3
    assert tree.segments[0].text == "Q: a?\n"
    assert tree.segments[0].token_ids == (BEGIN, *map(ord, "Q: a?\n"))
    assert tree.policy_segments == (1, 2, 3)
    assert tree.problem == problem("a")


def test_two_turns_put_one_question_below_each_answer_and_the_confidences_below_it():
    (tree,) = grown(two_turn, ["a"], [7])
    shape = [(s.parent, s.author, s.kind, s.turn) for s in tree.segments]
    answers, questions = (1, 2, 3), (4, 5, 6)
    assert shape[:4] == [(NO_PARENT, "prompt", "", 0)] + [(0, "policy", "answer", 1)] * 3
    assert shape[4:7] == [(answer, "prompt", "", 0) for answer in answers]
    assert shape[7:] == [(q, "policy", "confidence", 2) for q in questions for _ in range(2)]
    assert tree.turns(9) == (2, 9)
    assert tree.path(9) == (0, 2, 5, 9)
    assert {tree.segments[q].text for q in questions} == {"sure of a?\n"}


def test_an_unfinished_answer_is_closed_before_the_question_and_a_finished_one_is_not():
    trees = grown(two_turn, "abcdef", range(6))
    seen = set()
    for tree in trees:
        for question in tree.segments:
            if question.author == "prompt" and question.parent != NO_PARENT:
                reason = tree.segments[question.parent].finish_reason
                seen.add(reason)
                assert (question.token_ids[0] == END) == (reason == "length")
    assert seen == {"stop", "length"}


def test_without_a_template_a_turn_goes_on_where_the_one_before_stopped():
    forked = two_turn.model_copy(
        update={"confidence": TurnSpec(template="", spans=("confidence",))}
    )
    session = Hashing()
    (tree,) = grown(forked, ["a"], [7], session)
    between = [tree.segments[q] for q in (4, 5, 6)]
    assert [(s.author, s.token_ids, s.text) for s in between] == [("prompt", (), "")] * 3
    asked, _ = session.calls[1]
    first = tree.segments[0].token_ids
    assert [r.context for r in asked] == [first + tree.segments[a].token_ids for a in (1, 2, 3)]


@pytest.mark.parametrize("opened", [False, True])
def test_a_turn_starts_inside_think_if_it_is_the_first_or_its_prompt_opens_it(opened):
    asked = two_turn.confidence.model_copy(update={"template": "sure?\n<think>\n"})
    spec = two_turn.model_copy(update={"confidence": asked} if opened else {})
    turns = [s for t in grown(spec, "abcdefgh", range(8)) for s in t.segments if s.turn]
    unopened = [s for s in turns if "</think>" in s.text and "<think>" not in s.text]
    assert {(s.kind, "think" in s.spans) for s in unopened} == {
        ("answer", True),
        ("confidence", opened),
    }


def test_contexts_are_exactly_the_tokens_on_the_path():
    session = Hashing()
    trees = grown(two_turn, "ab", [1, 2], session)
    (first, _), (second, sampling) = session.calls
    assert [r.context for r in first] == [tree.token_ids(0) for tree in trees]
    # Questions stand before their confidences in the tree, in the order of the requests.
    questions = [(tree, i) for tree in trees for i in (4, 5, 6)]
    assert [r.context for r in second] == [tree.token_ids(i) for tree, i in questions]
    assert [r.extends for r in first] == [None] * 2
    assert [r.extends for r in second] == list(range(6)), "the completions of the call before"
    assert sampling == two_turn.confidence


def test_every_turn_has_a_seed_of_its_own():
    trees = grown(two_turn, "abcd", [5, 6, 7, 8])
    seeds = [tree.segments[i].seed for tree in trees for i in tree.policy_segments]
    assert len(set(seeds)) == len(seeds)
    assert trees[0].segments[2].seed == derive_seed(5, "turn", 1)
    assert trees[1].segments[10].seed == derive_seed(6, "turn", 1, 1)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4))
def test_more_generations_leave_those_before_as_they_were(few, more):
    """Turns are seeded by their place, so a larger group is the smaller one and then some."""
    small = build_rollout_plan(two_turn.model_copy(update={"num_generations_answer": few}))
    large = build_rollout_plan(two_turn.model_copy(update={"num_generations_answer": few + more}))
    a, b = (
        sample_rollout_trees(p, [problem("a")], [1], Hashing(), Characters())[0]
        for p in (small, large)
    )
    assert a.segments[: 1 + few] == b.segments[: 1 + few]
    mine = {s.seed for s in a.segments if s.kind == "confidence"}
    assert mine <= {s.seed for s in b.segments if s.kind == "confidence"}


def test_a_prompt_is_data_and_not_a_template():
    braces = Problem(id="b", prompt="{prompt} {0} {x}", fields={})
    (tree,) = sample_rollout_trees(
        build_rollout_plan(single), [braces], [1], Hashing(), Characters()
    )
    assert tree.segments[0].text == "Q: {prompt} {0} {x}\n"


def test_seeds_are_what_they_were_for_ever():
    """A recorded run must stay reproducible: this number never changes."""
    assert derive_seed(0, "sample", 3, 1) == 6930171997090759306


purposes = st.lists(st.integers(-5, 400) | st.text(max_size=3), max_size=4)


@settings(deadline=None)
@given(st.integers(), purposes, st.integers(), purposes)
def test_seeds_differ_where_anything_differs(seed, purpose, other, purpose_2):
    same = (seed, purpose) == (other, purpose_2)
    a, b = derive_seed(seed, *purpose), derive_seed(other, *purpose_2)
    assert (a == b) == same
    assert 0 <= a < 2**63
