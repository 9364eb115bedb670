import json
import math
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import each_row

from rlx.plugin import Sample, get_last_block
from rlx_plugins.countdown import (
    CountdownScore,
    CountdownVerify,
    compute_score,
    evaluate_equation,
    extract_solution,
    validate_equation,
    verify_equation_strict,
)
from rlx_plugins.countdown.expression import UncomputableError, evaluate_expression

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    json.loads(line)
    for line in (GOLDEN / "countdown_cases.jsonl").read_text(encoding="utf-8").split("\n")
    if line  # not `splitlines`: one case holds a line separator of Unicode
]
# The file lists what a tolerance and the rounding of a large number let pass as right; exact
# arithmetic, which is the default, does not.
INEXACT = {"cd086", "cd087"}


def expected(case):
    """The score by the default rule."""
    return 0.1 if case["id"] in INEXACT else case["expected"]


def expected_of_source(case):
    return case.get("expected_source", case["expected"])


def truth(case):
    return {"target": case["target"], "numbers": case["numbers"]}


def answer(equation):
    return f"<answer>{equation}</answer>"


def python_value(text):
    """What Python makes of an expression; None for everything that is no finite real number."""
    try:
        value = eval(text, {"__builtins__": None}, {})
    except Exception:
        return None
    if type(value) is float:
        return value if math.isfinite(value) else None
    return value if type(value) is int else None


@each_row("case", CASES, ids=lambda case: case["id"])
def test_the_known_cases(case):
    response, problem = case["response"], truth(case)
    said = Sample(id="a", problem=problem, turn="answer", number=1, response=response)
    right, of_source = expected(case), expected_of_source(case)
    assert compute_score(response, problem) == right
    assert CountdownScore(ops="python").score(said).value == right
    assert CountdownVerify(ops="python").score(said).value == float(right == 1.0)
    assert compute_score(response, problem, allow_decimals=True) == of_source
    assert CountdownScore(allow_decimals=True).score(said).value == of_source
    judged = verify_equation_strict(response, case["target"], case["numbers"])
    assert judged is (of_source == 1.0)
    assert CountdownScore().score(said).value <= right


def test_a_distance_of_the_tolerance_itself_is_too_far():
    scores = [
        compute_score(answer("1-1"), {"numbers": [1, 1], "target": target}, allow_decimals=True)
        for target in (1e-5, math.nextafter(1e-5, 0))
    ]
    assert scores == [0.1, 1.0]


ROUNDED = [
    ("69/86", 69 / 86, 1.0),
    ("1/3", 0.3333333333333333, 1.0),
    ("1/10", 0.1, 1.0),
    ("5352+17/5579", 5352 + 17 / 5579, 1.0),
    ("1/3", 0.333333, 0.1),
    ("1/6", 0.166666666667, 1.0),
    ("1/6", 0.1666666666674, 0.1),
    ("1/999999", 1 / 999_999, 1.0),
    ("1/1000003", 1 / 1_000_003, 0.1),
    ("1/3+8**-30*9", 0.3333333333333333, 0.1),
    ("3/2+9*8**-30", 1.5, 0.1),
    ("1000000000000000+1/9", 1e15, 0.1),
]


@each_row(("equation", "target", "score"), ROUNDED)
def test_a_target_with_decimals_is_the_fraction_that_rounds_to_it(equation, target, score):
    numbers = [int(run) for run in re.findall(r"\d+", equation)]
    assert compute_score(answer(equation), {"target": target, "numbers": numbers}) == score


@each_row(
    ("equation", "reason"),
    [
        ("2.5*4", "decimal number"),
        ("0.60.151+*", "not computable: stray decimal point"),
        ("2.5*4<", "not computable: it holds what is no arithmetic"),
        ("2.5*3", "wrong numbers"),
        ("2.4*5", "wrong value"),
    ],
)
def test_a_decimal_is_the_reason_only_where_it_decides(equation, reason):
    """Stored rollouts keep their reasons: an answer that was not right has the same one."""
    problem = {"numbers": [2, 4, 5], "target": 10}
    said = Sample(id="a", problem=problem, turn="answer", number=1, response=answer(equation))
    assert CountdownVerify().score(said).reason == reason
    if reason != "decimal number":
        assert CountdownVerify(allow_decimals=True).score(said).reason == reason


# The probe's judgement ---------------------------------------------------------------------------


def test_the_probe_takes_its_arguments_by_the_names_of_the_source():
    solved = {"solution_str": answer("3*4-2"), "target_val": 10, "allowed_nums": [4, 2, 3]}
    assert verify_equation_strict(**solved) is True
    vanishing = answer("50+.0000003+.0000008+.0000009")
    assert verify_equation_strict(vanishing, 50, [3, 8, 9, 50]) is True
    assert compute_score(vanishing, {"target": 50, "numbers": [3, 8, 9, 50]}) == 0.1


@each_row(
    ("text", "target", "numbers"),
    [
        (None, 7, [3, 4]),
        (answer("3+4"), None, [3, 4]),
        (answer("3+4"), "7", [3, 4]),
        (answer("3+4"), 7, None),
        (answer("3+4"), 7, ["3", "4"]),
        (answer("3+4"), math.nan, [3, 4]),
    ],
)
def test_what_cannot_be_scored_is_not_right(text, target, numbers):
    assert verify_equation_strict(text, target, numbers) is False


# Where the answer is -----------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "a", "<", " "]), max_size=12))
def test_last_block_equals_the_regular_expression(parts):
    text = "".join(parts)
    found = re.findall(r"<answer>(.*?)</answer>", text)
    assert get_last_block(text, "<answer>", "</answer>") == (found[-1] if found else None)


@given(
    st.lists(
        st.sampled_from(["<answer>", "</answer>", "1+2", "\n", "Assistant:", " ", "\r\n"]),
        max_size=10,
    )
)
def test_extraction_equals_the_source(parts):
    text = "".join(parts)
    after = text.split("Assistant:", 1)[1] if "Assistant:" in text else text
    found = re.findall(r"<answer>(.*?)</answer>", after.split("\n")[-1])
    assert extract_solution(text) == (found[-1].strip() if found else None)


# Which numbers -----------------------------------------------------------------------------------


def test_a_number_beyond_pythons_limit_is_none_of_a_problem():
    longest, beyond = (10**n // 9 for n in (4300, 4301))  # all digits 1
    assert validate_equation("1" * 4300 + "+2", [longest, 2])
    assert not validate_equation("1" * 4301 + "+2", [beyond, 2])


# What it is worth --------------------------------------------------------------------------------

NUMBERS = st.sampled_from(["0", "1", "2", "3", "12", "007", "00", "2.5", ".5", "5.", "03.5"])
PIECES = ["+", "-", "*", "/", "//", "**", "(", ")", " ", "\t", "\f", "\n", "\r", "."]


def trees(children):
    binary = st.tuples(children, st.sampled_from(["+", "-", "*", "/", "//", " - "]), children)
    small_power = st.tuples(NUMBERS, st.just("**"), st.sampled_from(["2", "-1", ".5", "-3", "+0"]))
    nested = st.tuples(st.sampled_from(["(", "( ", "(\n"]), children, st.just(")"))
    signed = st.tuples(st.sampled_from(["-", "+", "--"]), children)
    return st.one_of(binary, small_power, nested, signed).map("".join)


@settings(max_examples=100)
@given(st.recursive(NUMBERS, trees, max_leaves=8))
def test_wellformed_arithmetic_equals_python(text):
    expected, value = python_value(text), evaluate_equation(text)
    assert value == expected
    assert type(value) is type(expected)


@settings(max_examples=100)
@given(st.lists(st.one_of(NUMBERS, st.sampled_from(PIECES)), min_size=1, max_size=8).map("".join))
def test_any_text_is_refused_exactly_where_python_refuses_it(text):
    text = text.strip()
    if text.count("**") > 1 or re.search(r"\*\*[ (]*(12|00?7)", text):
        return  # Python might compute for hours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        expected = python_value(text)
    if isinstance(expected, int) and expected.bit_length() > 4096:
        expected = None  # larger powers are refused, so that time is bounded
    assert evaluate_equation(text) == expected


@each_row("depth", [1, 199, 200, 201, 5000])
def test_parentheses_nest_as_deep_as_in_python(depth):
    text = "(" * depth + "3" + ")" * depth
    assert evaluate_equation(text) == (3 if depth <= 200 else None)


@each_row(
    "text",
    [
        "-" * 1000 + "3",
        "+".join(["1"] * 1000),
        "3" + " " * 9999 + "+1",
        *("1**9999999", "(-1)**9999999", "0**9999999", "2**-9999999"),
        *(" 3+4", "3+4\n", "\n3+4\r\n", "\t\f3 +\t4 \n"),
    ],
)
def test_long_and_large_expressions_that_python_computes(text):
    assert evaluate_equation(text) == python_value(text) is not None


@each_row(
    ("text", "reason"),
    [
        ("", "empty"),
        ("3+x", "no arithmetic"),
        ("٣+4", "no arithmetic"),
        ("3 4", "without an operator"),
        ("3(4)", "without an operator"),
        ("3+", "operand"),
        ("()", "operand"),
        ("(3", "unbalanced"),
        ("3)", "unbalanced"),
        ("3)+(4", "unbalanced"),
        ("03", "leading zero"),
        ("1.2.3", "decimal point"),
        ("...", "decimal point"),
        ("3+\n4", "line end"),
        ("9**9**9", "too large"),
        ("(-1)**.5", "complex"),
        ("1" * 4301, "too long"),
        ("9**999*" * 100 + "1", "too large"),
        ("9**999*9**999//9**999//9**999*" * 90 + "1", "too much work"),
    ],
)
def test_refusals_say_why(text, reason):
    with pytest.raises(UncomputableError, match=reason):
        evaluate_expression(text)


@each_row(
    "text",
    ["1/0", "1//0", "0**-1", "1/(2-2)", "9.0**999", "9" * 400 + ".*1", "(" + "9" * 400 + ")/.5"],
)
def test_division_by_zero_and_overflow_have_no_value(text):
    assert evaluate_equation(text) is None
    if "0" in text and "." not in text:
        assert evaluate_equation(text, numeric="exact") is None


def test_exact_numbers():
    assert evaluate_equation("1/3+1/3+1/3", numeric="exact") == 1
    assert evaluate_equation("2**-2*(4/1)", numeric="exact") == 1
    assert evaluate_equation("4**.5", numeric="exact") is None
    assert evaluate_equation("(1/3)**9999", numeric="exact") is None
    for text, target in (("1/10", 0.1), ("10**1000", 10**1000), ("10**400*2", 2e400)):
        numbers = [int(run) for run in re.findall(r"\d+", text)]
        score = compute_score(answer(text), {"target": target, "numbers": numbers})
        assert score == (0.1 if target == math.inf else 1.0)


@each_row("text", ["-3+5", "3--5", "2**3", "7//2", "3*-5"])
def test_prompt_operators_only(text):
    assert evaluate_equation(text) is not None
    assert evaluate_equation(text, ops="prompt") is None
    assert evaluate_equation("(3-5)*2/4", ops="prompt") == -1


# Hostile input -----------------------------------------------------------------------------------

N = 200_000


def block(text):
    """An answer of hostile length."""
    return answer(text[: N - 17])


HOSTILE = {
    "openings": ("<answer>" * (N // 8), "no answer block"),
    "closings": ("</answer>" * (N // 9), "no answer block"),
    "openings, then one closing": (
        "<answer>" * (N // 8 - 2) + "</answer>",
        "not computable: too long",
    ),
    "an opening, then closings": ("<answer>" + "</answer>" * (N // 9 - 1), "empty answer"),
    "digits": (block("1" * N), "not computable: number too long"),
    "points": (block("." * N), "not computable: number too long"),
    "sum": (block("1+" * N), "not computable: too long"),
    "spaces": (answer("1" + " " * (N - 30) + "+1"), None),
    "tower": (answer("9**" * 1900 + "9"), "not computable: power too large"),
    "work": (
        answer("9**999*9**999//9**999//9**999*" * 99 + "1"),
        "not computable: too much work",
    ),
    "literals": (answer("*".join(["9" * 1000] * 190)), "not computable: number too large"),
    "fractions": (
        answer("+".join(f"1/{n}" for n in range(2, 1400))),
        "not computable: too much work",
    ),
    "fraction powers": (
        answer("+".join(f"(1/{n})**400" for n in range(2, 700))),
        "not computable: number too large",
    ),
    "lines": ("\n" * N, "no answer block"),
    "markers": ("Assistant:" * (N // 10), "no answer block"),
    "near misses": ("<answer>1+1</answe><answer 1</answer" * (N // 40), "no answer block"),
    "signs": (block("-" * 2978 + "2"), None),
    "more signs": (block("-" * 2981 + "2"), "not computable: too deep"),
    "long numbers": (answer("+".join(["9" * 4300] * 46)), "wrong value"),
    "prose": (block("three and four " * N), "not computable: too long"),
}


@each_row(("text", "reason"), HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_answers_are_refused_before_they_cost_much(text, reason):
    """Each reason is a limit on tokens, depth or size, reached before Python would be lost."""
    assert len(text) <= N
    # As many numbers as the answer has, so that no cheap check ends it early.
    numbers = re.findall(r"[0-9]{1,4300}", extract_solution(text) or "")
    said = sample(text, target=2, numbers=[int(n) for n in numbers])
    assert CountdownScore(ops="python").score(said).reason == reason


@given(st.text(max_size=60))
def test_no_text_makes_it_raise(text):
    for response in (text, answer(text)):
        assert compute_score(response, {"target": 1, "numbers": [1]}) in (0.0, 0.1, 1.0)


# The plugins -------------------------------------------------------------------------------------


def sample(response, **problem):
    problem = {"numbers": [3, 4], "target": 7} | problem
    return Sample(id="a", problem=problem, turn="answer", number=1, response=response)


@each_row(
    ("response", "value", "reason"),
    [
        (answer("3+4"), 1.0, None),
        ("3+4", 0.0, "no answer block"),
        (answer(""), 0.1, "empty answer"),
        (answer("3+5"), 0.1, "wrong numbers"),
        (answer("3*4"), 0.1, "wrong value"),
        (answer("3+4="), 0.1, "not computable: it holds what is no arithmetic"),
        (answer("3/(4-4)"), 0.1, "not computable: division by zero"),
    ],
)
def test_scores_say_why(response, value, reason):
    score = CountdownScore().score(sample(response))
    assert (score.value, score.reason) == (value, reason)
    verdict = CountdownVerify().score(sample(response))
    assert (verdict.value, verdict.reason) == (float(value == 1.0), reason)


def test_an_answer_lost_to_the_last_line_is_counted():
    lost = CountdownScore().score(sample(answer("3+4") + "\n"))
    assert (lost.value, lost.parts) == (0.0, {"format_lost_to_lastline": 1.0})
    kept = CountdownScore(extract="last_block").score(sample(answer("3+4") + "\n"))
    assert (kept.value, kept.parts) == (1.0, {"format_lost_to_lastline": 0.0})


def test_options_reach_the_score():
    reward = CountdownScore.model_validate({"format_score": 0.2, "score": 2.0})
    assert reward.score(sample(answer("3+4"))).value == 2.0
    assert reward.score(sample(answer("3-4"))).value == 0.2
    assert CountdownVerify.model_validate({"score": 2.0}).score(sample(answer("3+4"))).value == 0.0
    assert CountdownVerify(format_score=1.0).score(sample(answer("3-4"))).value == 0.0
    assert CountdownVerify(ops="prompt").score(sample(answer("-3+4"), target=1)).value == 0.0


@each_row(
    "problem",
    [
        {"numbers": ["3", "4"]},
        {"numbers": None},
        {"numbers": "34"},
        {"numbers": [True, 4]},
        {"numbers": [math.nan, 4]},
        {"target": None},
        {"target": "7"},
        {"target": True},
        {"target": math.inf},
    ],
)
def test_a_bad_ground_truth_is_the_scorers_fault(problem):
    for reward in (CountdownScore(), CountdownVerify()):
        with pytest.raises(ValueError, match="finite number"):
            reward.score(sample(answer("3+4"), **problem))


def test_the_function_lets_a_bad_ground_truth_pass_as_the_source_does():
    for ground_truth in ({"numbers": ["3", "4"], "target": 7}, {"numbers": [3, 4], "target": None}):
        assert compute_score(answer("3+4"), ground_truth) == 0.1
