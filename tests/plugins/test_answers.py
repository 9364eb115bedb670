"""`exact_match` and `math_verify`: right answers, wrong ones, and hostile ones."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import each_row

from rlx.plugin import Sample
from rlx.reward import RewardJob, RewardPool
from rlx_plugins.answer_text import format_number, normalize_answer, parse_number
from rlx_plugins.answers import AnswerExactMatch
from rlx_plugins.mathematics import MathVerify

REWARDS = {"exact_match": AnswerExactMatch, "math_verify": MathVerify}
WORKED = "She has 48 + 24 = 72 left.\n#### 72"
CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("reward_cases.jsonl").read_text().splitlines()
]


def sample(given, right="42", *, response="", **fields):
    spans = {} if given is None else {"answer": given}
    return Sample(
        id="a",
        problem={"answer": right} | fields,
        turn="answer",
        number=1,
        response=response,
        spans=spans,
    )


@each_row(
    ("given", "right", "value", "reason"),
    [
        ("42", "42", 1.0, None),
        (" 42\n", "42 ", 1.0, None),
        ("42", 42, 1.0, None),
        ("0.5", 0.5, 1.0, None),
        ("b", ["a", "b"], 1.0, None),
        ("c", ["a", "b"], 0.0, "wrong answer"),
        ("Paris", "paris", 0.0, "wrong answer"),
        ("", "42", 0.0, "no answer"),
        (None, "42", 0.0, "no answer"),
        ("72", WORKED, 1.0, None),
        ("48", WORKED, 0.0, "wrong answer"),
        ("72", "#### 72", 1.0, None),
        ("72", WORKED + "\n", 1.0, None),
        ("72", "#### 72\nor so", 0.0, "wrong answer"),
        ("72", "C#### 72", 0.0, "wrong answer"),
        ("seventy-two", [WORKED, "seventy-two"], 1.0, None),
    ],
)
def test_letter_by_letter_and_by_the_last_line_of_a_worked_solution(given, right, value, reason):
    score = AnswerExactMatch().score(sample(given, right))
    assert (score.value, score.reason) == (value, reason)


@each_row("right", [None, "", " ", [], ["a", None], True, {"a": 1}, [["a"]]])
@each_row("reward", [AnswerExactMatch(), MathVerify()], ids=["text", "mathematics"])
def test_a_problem_without_an_answer_is_not_the_models_fault(reward, right):
    with pytest.raises(ValueError, match="'answer' must hold text or numbers"):
        reward.score(sample("a", right))


def test_a_problem_without_the_field_says_which_it_has():
    for reward in (AnswerExactMatch(), MathVerify(field="reward_model.ground_truth")):
        with pytest.raises(ValueError) as caught:
            reward.check_problem({"prompt": "3 + 4", "solution": "7"})
        assert str(caught.value) == (
            f"there is no field '{reward.field}'; the problem has 'prompt', 'solution'"
        )


@each_row("case", CASES, ids=[case["id"] for case in CASES])
def test_answers_that_other_graders_got_wrong(case):
    found = re.search(r"<answer>(.*)</answer>", case["response"], re.DOTALL)
    said = sample(found and found[1], case["answer"], response=case["response"])
    score = REWARDS[case["reward"]](**case["options"]).score(said)
    assert score.value == case["expected"], score


@each_row(
    ("text", "normal"),
    [
        ("1,000,000 people", "1000000 people"),
        ("10:30", "10:30"),
        ("50 %", "50%"),
        ("x > 5", "x>5"),
        ("½ cup", "1/2 cup"),
        ("50%", "50%"),
        (".5", "0.5"),
        ("-0.0", "0"),
        ("about 5.", "about 5"),
        ("x = -5", "x -5"),
        ("A+", "a+"),
        ("C#", "c#"),
        ("blood type A-", "blood type a-"),
        ("vitamin A", "vitamin a"),
        ("A cat", "cat"),
        ("well-known", "wellknown"),
        ("1914–18", "1914-18"),
        ("!!!", "!!!"),
    ],
)
def test_the_normal_form_of_an_answer(text, normal):
    assert normalize_answer(text) == normal


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_read_as_it_was_written(value):
    assert float(parse_number(format_number(value))) == value


# In workers, as in a run: every comparison forks, which a process with threads should not.


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=1, memory_mb=512) as pool:
        yield pool


def judged(pool, *samples, deadline=30.0, **options):
    """What the reward says of each sample: (value, reason), or the fault."""
    jobs = [RewardJob(MathVerify(**options), (s,), deadline) for s in samples]
    outcomes = pool.score(jobs)
    return [o.fault or (o.verdicts[0].value, o.verdicts[0].reason) for o in outcomes]


@each_row(
    ("right", "same", "other"),
    [
        ("72", ["72", "72.", "72.0", "$72$", r"\boxed{72}", "144/2", "so it is $72$"], ["71", "7"]),
        ("72", ["x = 12*6 = 72"], ["12*6 = 71"]),
        (42, ["42"], ["42.1"]),
        (0.5, ["1/2", r"\frac12", r"$\frac{2}{4}$", "0.5", ".50"], ["0.6"]),
        ("1,234", ["1234", "1,234"], ["1,235"]),
        ("2", ["2"], ["2x+1", "22", "9_2"]),
        ("3", ["3"], ["3 5"]),
        ("0", ["0"], ["0.0000001"]),
        (1e-05, ["1e-5"], []),
        ("5.5", [r"5\frac{1}{2}", "5 1/2"], []),
        ("5", ["5 km"], ["5 x"]),  # the data say nothing of a unit
        ("5 km", [], ["5"]),
        (r"5\text{ km}", ["5 km"], []),
        ("10 m/s", [], ["10 km/h"]),
        ("3 hours", ["3 hour"], []),
        ("20\\%", ["0.2"], []),
        ("18", ["\\$18"], []),
        ("90", [r"90^\circ"], []),
        ("3x", ["3 x"], []),
        ("y=2x+1", ["2x+1"], []),
        ("2x+1", ["1+2x", "$2x + 1$"], ["2", "2x"]),
        ("$(x+1)^2$", ["x^2+2x+1"], ["x^2+1"]),
        (r"\sqrt{2}", ["sqrt(2)", r"2^{1/2}"], ["2"]),
        ("6*8 + 24 = 72\n#### 72", ["72.0"], ["48"]),
        (["12", "13"], ["12", "13"], ["14"]),
    ],
)
def test_what_is_equal_as_mathematics_is_right(pool, right, same, other):
    texts = [*same, *other]
    values = [value for value, _ in judged(pool, *(sample(text, right) for text in texts))]
    assert dict(zip(texts, values, strict=True)) == {text: float(text in same) for text in texts}


def test_a_whole_response_is_read_for_its_last_formula(pool):
    text = "First $3 + 4$, then 6. The final answer is $7$."
    assert judged(pool, sample(None, "7", response=text), span=None) == [(1.0, None)]
    assert judged(pool, sample(None, "7", response=text)) == [(0.0, "no answer")]


def test_the_last_box_counts_also_where_it_is_cut_off():
    reward = MathVerify(span=None)
    assert (
        reward.score(sample(None, "41", response=r"\boxed{41}, no: \boxed{42")).reason
        == "unreadable"
    )
    nested = r"\boxed{\frac{1}{2}}"
    assert reward.score(sample(None, "0.5", response=nested)).value == 1.0


HOSTILE = {
    "a tower of powers": "9**9**9",
    "a tower in LaTeX": "$9^{9^{9^9}}$",
    "brackets": "(" * 1999,
    "fractions": r"\frac{1}{" * 200 + "2" + "}" * 200,
    "an integral": r"\int_0^1 \sin(x^x) dx",
    "dollars": "$" * 1999,
    "digits": "9" * 100_000,
    "escapes": "\x1b[2J\x00",
    "words": "???",
}


def test_hostile_answers_are_wrong_and_cost_no_more_than_their_time(pool):
    verdicts = judged(pool, *(sample(text) for text in HOSTILE.values()))
    assert {v[0] for v in verdicts} == {0.0}, verdicts
    reasons = dict(zip(HOSTILE, (v[1] for v in verdicts), strict=True))
    slow = "not compared: took more than 1 s of processor time"
    assert reasons["a tower of powers"] == reasons["a tower in LaTeX"] == slow
    assert reasons["words"] == reasons["escapes"] == "unreadable"
    assert reasons["digits"] == "longer than 2000 characters"


@each_row("right", ["72 ## 73", "???", "48/2 = 24. #### 72"])
def test_what_cannot_be_read_is_refused_before_a_run(right):
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        MathVerify().check_problem({"answer": right})


@each_row("right", [r"5\text{ square units}", "Yes", "x = 5", r"\sin x \cos x", "no solution"])
def test_words_and_formulas_can_be_read(right):
    MathVerify().check_problem({"answer": right})


def test_the_workers_own_deadline_still_holds(pool):
    # The library's own alarm clock would have taken it away.
    verdicts = judged(pool, sample("42"), sample("9**9**9"), deadline=0.3)
    assert verdicts == [(1.0, None), "deadline of 0.3 s passed"]
    assert judged(pool, sample("42")) == [(1.0, None)]
