"""Curricula: what is drawn by measured success, and the same again after a resume."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import each_row

from rlx.plugin import Problem
from rlx.rollout import Curriculum, PromptFit, compute_draw_probability
from rlx.spec import CurriculumRule

SETS = 12
"""Problems that the task has; number n is problem n modulo this."""


def problem(number):
    name = number % SETS
    return Problem(id=str(name), prompt="?", fields={}, stratum="easy" if name < 6 else "")


def draw(curriculum, start, count, seed=0):
    fit = PromptFit(plan=None, dialogue=None, context_length=0, rule=None)
    return fit.draw_train(problem, start, count, lambda n, p: curriculum.draws(n, p, seed))


@each_row(
    ("success", "floor", "probability"),
    [(0.0, 0.1, 0.1), (1.0, 0.1, 0.1), (0.5, 0.1, 1.0), (0.25, 0.2, 0.8), (0.75, 0.2, 0.8)],
)
def test_half_solved_problems_are_drawn_most(success, floor, probability):
    assert compute_draw_probability(success, floor) == pytest.approx(probability)


def test_problems_that_are_always_or_never_solved_are_drawn_less():
    success = {"problem/0": 1.0, "problem/1": 0.0, "problem/2": 0.5}
    drawn = draw(Curriculum(CurriculumRule(floor=0.1), success), 0, 6000)
    counts = {name: sum(p.id == name for p in drawn.problems) for name in ("0", "1", "2", "3")}
    passes = drawn.examined / SETS
    assert counts["2"] == pytest.approx(passes, abs=1), "half solved"
    assert counts["3"] == pytest.approx(passes, abs=1), "never measured"
    for name in ("0", "1"):
        assert counts[name] / passes == pytest.approx(0.1, abs=0.04)
    assert drawn.passed == drawn.examined - 6000
    assert drawn.dropped == 0


def test_by_stratum_problems_share_a_measurement_and_those_without_are_always_drawn():
    curriculum = Curriculum(CurriculumRule(by="stratum", floor=0.1), {"stratum/easy": 1.0})
    drawn = draw(curriculum, 0, 3000)
    easy = sum(p.stratum == "easy" for p in drawn.problems)
    assert easy / (drawn.examined / 2) == pytest.approx(0.1, abs=0.04)
    assert 3000 - easy == pytest.approx(drawn.examined / 2, abs=SETS)


def test_success_is_a_running_share_of_every_measurement():
    curriculum = Curriculum(CurriculumRule(rate=0.25), {"problem/1": 0.4, "problem/5": 0.9})
    found = [(problem(1), 0.0), (problem(1), 1.0), (problem(2), 0.75)]
    assert curriculum.measure(found) == pytest.approx(
        {"problem/1": 0.4 + 0.25 * (0.5 - 0.4), "problem/5": 0.9, "problem/2": 0.75}
    )
    assert curriculum.success == {"problem/1": 0.4, "problem/5": 0.9}, "unchanged"


def test_problems_without_a_stratum_are_not_measured_by_it():
    curriculum = Curriculum(CurriculumRule(by="stratum"), {})
    assert curriculum.measure([(problem(7), 1.0), (problem(0), 0.5)]) == {"stratum/easy": 0.5}


def steps(outcomes, rule, seed, resumed_after):
    """The numbers drawn in every step; the state goes through a checkpoint after some of them."""
    success, cursor, numbers = {}, 0, []
    for step, shares in enumerate(outcomes):
        drawn = draw(Curriculum(rule, success), cursor, len(shares), seed)
        numbers.append(drawn.numbers)
        cursor += drawn.examined
        success = Curriculum(rule, success).measure(zip(drawn.problems, shares, strict=True))
        if step in resumed_after:
            success = json.loads(json.dumps(success))  # as state.json has it
    return numbers, success


@given(
    outcomes=st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=12),
    rule=st.builds(
        CurriculumRule,
        by=st.sampled_from(["problem", "stratum"]),
        floor=st.floats(0.02, 1),
        rate=st.floats(0.01, 1),
    ),
    seed=st.integers(0, 2**40),
    resumed_after=st.sets(st.integers(0, 11)),
)
def test_a_resumed_run_draws_the_same(outcomes, rule, seed, resumed_after):
    assert steps(outcomes, rule, seed, resumed_after) == steps(outcomes, rule, seed, ())
