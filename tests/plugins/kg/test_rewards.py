"""Rewards of the agent's turns and rollouts."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rows import each_row

from rlx.plugin import Action, Sample
from rlx_plugins.kg.environment import KgEnvironment
from rlx_plugins.kg.rollout_rewards import (
    EntityF1,
    HitAt1,
    KgExactMatch,
    RetrievalQuality,
    normalize_name,
    parse_named_answers,
)

WHOLE = (EntityF1, KgExactMatch, HitAt1, RetrievalQuality)
N = 100_000


def rollout(answer, right, *, any_of=False, asked=(), **fields):
    infos = [{"function": function, "results": results} for function, results in asked]
    return Sample(
        id="a",
        problem={"answers": right, "any_of": any_of} | fields,
        turn="answer",
        number=1 + len(infos),
        response=f"<think></think><answer>{answer}</answer>",
        history=tuple(infos),
        info={"queries": len(infos)},
    )


@each_row(
    ("one", "other"),
    [
        ("The Gambia", "gambia"),
        ("Timor-Leste", "timorleste"),
        ("  United   Kingdom ", "united kingdom"),
        ("STRASSE", "straße"),
        ("“Paris”", "Paris"),
        (".fr", "fr"),
        ("Cote d'Ivoire", "Cote d’Ivoire"),
        ("Zu\u0308rich", "Zürich"),
    ],
)
def test_names_that_count_as_the_same(one, other):
    assert normalize_name(one) == normalize_name(other)


@each_row(
    ("one", "other"), [("Niger", "Nigeria"), ("The", "A"), ("!!!", "???"), ("Athens", "hens")]
)
def test_names_that_do_not(one, other):
    assert normalize_name(one) != normalize_name(other)
    assert normalize_name(one)


def test_names_stand_between_commas_and_may_hold_them():
    answers = {"washington dc": 0, "paris": 1, "x": 2}
    assert parse_named_answers("Paris, Washington, D.C., Rome, the paris", answers) == [
        1,
        0,
        "rome",
    ]
    assert parse_named_answers("\nParis\n x ,,", answers) == [1, 2]
    assert parse_named_answers(" ", answers) == []


TWO = [["Bonn"], ["Berlin", "Q64", "Berlin City"]]


@each_row(
    ("answer", "any_of", "em", "f1", "hit"),
    [
        ("Bonn, Berlin", False, 1.0, 1.0, 1.0),
        ("Q64, bonn", False, 1.0, 1.0, 1.0),
        ("Berlin, Q64, Berlin City", False, 0.0, 2 / 3, 1.0),
        ("Berlin", False, 0.0, 2 / 3, 1.0),
        ("Rome, Berlin", False, 0.0, 1 / 2, 0.0),
        ("Rome", False, 0.0, 0.0, 0.0),
        ("", False, 0.0, 0.0, 0.0),
        ("Berlin", True, 1.0, 1.0, 1.0),
        ("Berlin, Bonn", True, 1.0, 1.0, 1.0),
        ("Rome, Berlin", True, 0.0, 2 / 3, 0.0),
        ("Rome", True, 0.0, 0.0, 0.0),
    ],
)
def test_what_an_answer_is_worth(answer, any_of, em, f1, hit):
    said = rollout(answer, TWO, any_of=any_of)
    assert KgExactMatch().score(said).value == em
    assert EntityF1().score(said).value == KgExactMatch(mode="f1").score(said).value
    assert EntityF1().score(said).value == pytest.approx(f1)
    assert HitAt1().score(said).value == hit


@each_row(
    ("right", "answer"),
    [
        ([["b"], ["b"], ["c"]], "c, b"),
        ([["The Beatles"], ["Beatles"]], "Beatles"),
        ([["x"], ["y", "z"], ["Z", "x"]], "y"),
        ([["Ada", "m.1"], ["Ada", "m.2"]], "Ada"),
    ],
)
def test_right_answers_that_share_a_name_are_one(right, answer):
    for given_right in (right, right[::-1]):
        said = rollout(answer, given_right)
        assert [reward().score(said).value for reward in (KgExactMatch, EntityF1, HitAt1)] == [
            1.0
        ] * 3
    assert EntityF1().score(rollout("Bonn", [["Bonn"], ["Rome"]])).value == 2 / 3


@each_row("right", [None, [], ["Bonn"], [[]], [[1]], "Bonn", [["\u200b"]]])
@each_row("reward", WHOLE)
def test_a_problem_without_right_answers_is_not_the_models_fault(reward, right):
    with pytest.raises(ValueError, match="answers"):
        reward().score(rollout("Bonn", right))


def test_what_was_retrieved():
    exact, loose = RetrievalQuality(), RetrievalQuality(match="substring")
    said = rollout("x", TWO, asked=[("get_tail_entities", ["Berliner"])])
    assert (exact.score(said).value, loose.score(said).value) == (0.0, 1.0)
    said = rollout("x", TWO, asked=[("get_head_entities", ["Rome", "berlin city"])])
    assert (exact.score(said).value, loose.score(said).value) == (1.0, 1.0)
    # A relation of that name is not the entity.
    said = rollout("x", TWO, asked=[("get_tail_relations", ["Bonn"])])
    assert (exact.score(said).value, loose.score(said).value) == (0.0, 1.0)
    counted = rollout("2", [["2"]], asked=[("get_tail_entities", ["Bonn"])], evidence=TWO)
    assert exact.score(counted).value == 1.0


def played(environment, problem, query, answer):
    """The answer after a query that an environment has answered, and what it said."""
    state = environment.reset(problem, 0)
    step = environment.step(state, Action(text=f"<kg-query>{query}</kg-query>"))
    said = rollout(answer(step.observation), problem["answers"])
    return replace(said, observations=(step.observation,), history=(step.info,))


WORDS = st.lists(
    st.one_of(st.text(max_size=5), st.sampled_from(["a\u200bb", "\u202e", "<b>", ", ", "x" * 60])),
    max_size=8,
)


@given(WORDS)
@example(["word, "] * 60)
def test_a_name_copied_as_it_was_shown_is_right(words):
    name = "Z" + "".join(words) + "z"
    problem = {"triples": [["s", "r", name]], "answers": [[name]]}

    def copy(shown):
        return shown.removeprefix("<information> r of s: ").removesuffix(" </information>")

    said = played(KgEnvironment(hints=False), problem, "get_tail_entities( s, r)", copy)
    for reward in (KgExactMatch(), RetrievalQuality(), RetrievalQuality(match="substring")):
        assert reward.score(said).value == 1.0


def test_an_error_that_echoes_the_answer_is_no_retrieval():
    problem = {"answers": [["Atlantis"]]}
    query = "get_tail_relations( Atlantis)"
    said = played(KgEnvironment(), problem, query, lambda shown: "Atlantis")
    assert "Atlantis" in said.observations[0]
    for match in ("exact", "substring"):
        assert RetrievalQuality(match=match).score(said).value == 0.0


@each_row("answer", ["," * N, "a," * N, "a," + " " * N + ",b", "\n" * N, "the " * N])
def test_time_is_linear_on_hostile_answers(answer):
    said = rollout(answer, TWO)
    assert KgExactMatch().score(said).value == 0.0
