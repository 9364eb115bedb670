import itertools
import json
import math
import multiprocessing
import random
import re
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
from benchmarks.literal import literal_score
from hypothesis import given, settings
from hypothesis import strategies as st
from pebble import ProcessPool

from rlx.plugin import RewardPlugin, Sample
from rlx_plugins.countdown import (
    CountdownScore,
    CountdownVerify,
    compute_score,
    evaluate_equation,
    extract_solution,
    solves_problem,
    validate_equation,
    verify_equation_strict,
)
from rlx_plugins.countdown.expression import UncomputableError, evaluate_expression
from rlx_plugins.tags import last_block

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    json.loads(line)
    for line in (GOLDEN / "countdown_cases.jsonl").read_text(encoding="utf-8").split("\n")
    if line  # not `splitlines`: one case holds a line separator of Unicode
]
# The file lists what a tolerance and the rounding of a large number let pass as right; exact
# arithmetic, which is the default, does not.
INEXACT = {"cd086", "cd087"}
# Each needs what the safer option takes away: a root, a tolerance, a rounded large number.
NOT_EXACT = {"cd076", *INEXACT}
WITH_OTHER_OPERATORS = {"cd074", "cd076", "cd082", "cd084"}
WITH_DECIMALS = {"cd076", "cd077", "cd080"}


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_scores_the_known_cases(case):
    assert compute_score(case["response"], truth(case)) == expected(case)
    assert cpu_seconds(lambda: compute_score(case["response"], truth(case))) < 0.05


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_decimals_alone_are_the_rule_of_the_source(case):
    said = Sample(id="a", problem=truth(case), turn="answer", number=1, response=case["response"])
    score = compute_score(case["response"], truth(case), allow_decimals=True)
    assert score == expected_of_source(case)
    assert CountdownScore(allow_decimals=True).score(said).value == score


PAID_BY_THE_SOURCE = [
    ("50+.0000003+.0000008+.0000009", [50, 3, 8, 9], 50),
    ("4*.5", [5, 4], 2),
    ("2.*3", [2, 3], 6),
    ("50+3*8**-9", [50, 3, 8, 9], 50),
    ("50-1/99/98/97", [50, 1, 99, 98, 97], 50),
]


@pytest.mark.parametrize(("equation", "numbers", "target"), PAID_BY_THE_SOURCE)
def test_what_is_nearly_right_earns_the_format_alone(equation, numbers, target):
    problem = {"numbers": numbers, "target": target}
    assert compute_score(answer(equation), problem) == 0.1
    assert compute_score(answer(equation), problem, allow_decimals=True) == 1.0
    if "." in equation:
        assert compute_score(answer(equation), problem, numeric="exact") == 0.1
    else:
        assert compute_score(answer(equation), problem, numeric="float64") == 1.0


ROUNDED = [
    ("69/86", 69 / 86, 1.0),
    ("1/3", 0.3333333333333333, 1.0),
    ("1/10", 0.1, 1.0),
    ("5352+17/5579", 5352 + 17 / 5579, 1.0),
    ("1/3", 0.333333, 0.1),
    ("1/3+8**-30*9", 0.3333333333333333, 0.1),
    ("3/2+9*8**-30", 1.5, 0.1),
    ("1000000000000000+1/9", 1e15, 0.1),
]


@pytest.mark.parametrize(("equation", "target", "score"), ROUNDED)
def test_a_target_with_decimals_is_the_fraction_that_rounds_to_it(equation, target, score):
    numbers = [int(run) for run in re.findall(r"\d+", equation)]
    assert compute_score(answer(equation), {"target": target, "numbers": numbers}) == score
    assert solves_problem(equation, {"target": target, "numbers": numbers}) == (score == 1)


@given(st.integers(-9999, 9999), st.integers(1, 999), st.integers(0, 999))
def test_a_stored_quotient_is_reached_by_the_quotient(numerator, denominator, more):
    equation = f"({numerator}/{denominator}+{more})"
    problem = {
        "target": numerator / denominator + more,
        "numbers": [abs(numerator), denominator, more],
    }
    assert compute_score(answer(equation), problem) == compute_score(
        answer(equation), problem, allow_decimals=True
    )
    assert solves_problem(equation, problem) == (compute_score(answer(equation), problem) == 1.0)


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_oracle_agrees_on_the_known_cases(case):
    said = Sample(id="a", problem=truth(case), turn="answer", number=1, response=case["response"])
    solves = CountdownScore().is_solution(said)
    assert solves >= (CountdownScore().score(said).value == 1.0)
    assert solves <= (expected(case) == 1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_rewards_agree_with_the_function(case):
    sample = Sample(id="a", problem=truth(case), turn="answer", number=1, response=case["response"])
    assert CountdownScore(ops="python").score(sample).value == expected(case)
    assert CountdownVerify(ops="seed").score(sample).value == float(expected(case) == 1.0)


@pytest.mark.parametrize("equation", ["50+3//8*9", "50+(3-8)**0*9-9", "-3+53"])
def test_numbers_do_not_vanish_by_default(equation):
    problem = {"numbers": [3, 8, 9, 50], "target": 50}
    said = Sample(id="a", problem=problem, turn="answer", number=1, response=answer(equation))
    score = CountdownVerify().score(said)
    assert score.value == 0.0
    assert ("a sign" in score.reason) == equation.startswith("-")


# The probe's judgement ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_probe_judges_by_the_rule_of_the_source(case):
    right = verify_equation_strict(case["response"], case["target"], case["numbers"])
    assert right is (expected_of_source(case) == 1.0)


def test_the_probe_takes_its_arguments_by_the_names_of_the_source():
    solved = {"solution_str": answer("3*4-2"), "target_val": 10, "allowed_nums": [4, 2, 3]}
    assert verify_equation_strict(**solved) is True
    assert verify_equation_strict(**{**solved, "target_val": 11}) is False
    assert verify_equation_strict(**{**solved, "allowed_nums": [2, 3]}) is False
    vanishing = answer("50+.0000003+.0000008+.0000009")
    assert verify_equation_strict(vanishing, 50, [3, 8, 9, 50]) is True
    assert compute_score(vanishing, {"target": 50, "numbers": [3, 8, 9, 50]}) == 0.1


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("options", "stricter"),
    [
        ({"numeric": "exact"}, NOT_EXACT),
        ({"ops": "prompt"}, WITH_OTHER_OPERATORS),
        ({"allow_decimals": False}, WITH_DECIMALS | INEXACT),
        ({"allow_decimals": False, "numeric": "float64"}, WITH_DECIMALS),
    ],
)
def test_safer_options_differ_from_the_source_only_where_they_should(options, stricter):
    differing = {
        case["id"]
        for case in CASES
        if compute_score(case["response"], truth(case), **{"allow_decimals": True, **options})
        != expected_of_source(case)
    }
    assert differing == stricter


# Where the answer is -----------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "a", "<", " "]), max_size=12))
def test_last_block_equals_the_regular_expression(parts):
    text = "".join(parts)
    found = re.findall(r"<answer>(.*?)</answer>", text)
    assert last_block(text, "<answer>", "</answer>") == (found[-1] if found else None)


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


def test_last_block_is_found_on_any_line():
    text = "<answer>1\n+2</answer>\n<|im_end|>\n"
    assert extract_solution(text) is None
    assert extract_solution(text, "last_block") == "1\n+2"


# Which numbers -----------------------------------------------------------------------------------


def test_some_numbers_may_be_left_out():
    assert not validate_equation("3+4", [3, 4, 5])
    assert validate_equation("3+4", [3, 4, 5], use_all=False)
    assert not validate_equation("3+3", [3, 4], use_all=False)
    assert compute_score(answer("3+4"), {"target": 7, "numbers": [3, 4, 5]}, use_all=False) == 1.0


@given(
    st.lists(st.sampled_from(["3", "4", "2.5", ".5", "5.", "+", "*", "(", ")", " "]), max_size=9),
    st.lists(st.integers(2, 5), max_size=4),
)
def test_the_score_uses_the_numbers_check(parts, numbers):
    equation = "".join(parts).strip()
    value = python_value(equation)
    right = value is not None and validate_equation(equation, numbers)
    target = value if right else 1
    expected = 1.0 if right else 0.1
    problem = {"target": target, "numbers": numbers}
    assert compute_score(answer(equation), problem, allow_decimals=True) == expected


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


@pytest.fixture(scope="module")
def watched():
    """A process that may be killed for what it evaluates."""
    with ProcessPool(1, context=multiprocessing.get_context("spawn")) as pool:
        yield pool
        pool.stop()


def literal(pool, response, ground_truth):
    """The source's score; what it cannot compute in time, or at all, is not right."""
    try:
        return pool.schedule(literal_score, args=(response, ground_truth), timeout=60).result()
    except (TimeoutError, ValueError, MemoryError, RecursionError):
        return 0.1


BEFORE = ["", "<think>1+1=2</think>\n", "User: 1\nAssistant: ", answer("1"), "<answer>"]
AFTER = ["", "<|im_end|>", "\n", " Assistant: well", "</answer>", answer(""), "<answer>"]


@settings(max_examples=100)
@given(
    equation=st.recursive(NUMBERS, trees, max_leaves=6),
    around=st.tuples(st.sampled_from(BEFORE), st.sampled_from(AFTER)),
    off=st.sampled_from([0, 0, 0, 9e-6, 1.1e-5, -1]),
    seed=st.integers(0, 99),
)
def test_scores_equal_the_literal_reference(watched, equation, around, off, seed):
    numbers = [int(run) for run in re.findall(r"\d+", equation)]
    random.Random(seed).shuffle(numbers)
    if seed == 0:
        numbers.append(1)
    value = python_value(equation)
    response = around[0] + answer(f" {equation} ") + around[1]
    ground_truth = {"numbers": numbers, "target": 1 if value is None else value + off}
    score = compute_score(response, ground_truth, allow_decimals=True)
    assert score == literal(watched, response, ground_truth)


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


@pytest.mark.parametrize("depth", [1, 199, 200, 201, 5000])
def test_parentheses_nest_as_deep_as_in_python(depth):
    text = "(" * depth + "3" + ")" * depth
    assert evaluate_equation(text) == (3 if depth <= 200 else None)


@pytest.mark.parametrize(
    "text", ["-" * 1000 + "3", "+".join(["1"] * 1000), "3" + " " * 9999 + "+1"]
)
def test_long_expressions_that_python_computes(text):
    assert evaluate_equation(text) == python_value(text) is not None


@pytest.mark.parametrize("text", ["1**9999999", "(-1)**9999999", "0**9999999", "2**-9999999"])
def test_harmless_powers_with_large_exponents(text):
    assert evaluate_equation(text) == python_value(text)


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("numeric", ["float64", "exact"])
@pytest.mark.parametrize("text", ["1/0", "1//0", "0**-1", "1/(2-2)"])
def test_division_by_zero_has_no_value(text, numeric):
    with pytest.raises(ZeroDivisionError):
        evaluate_expression(text, numeric=numeric)
    assert evaluate_equation(text, numeric=numeric) is None


@pytest.mark.parametrize("text", ["9.0**999", "9" * 400 + ".*1", "(" + "9" * 400 + ")/.5"])
def test_overflow_has_no_value(text):
    assert evaluate_equation(text) is None


@pytest.mark.parametrize("text", [" 3+4", "3+4\n", "\n3+4\r\n", "\t\f3 +\t4 \n"])
def test_white_space_around_the_whole_does_not_count(text):
    assert evaluate_equation(text) == python_value(text) == 7


def test_exact_numbers():
    assert evaluate_equation("1/3+1/3+1/3", numeric="exact") == 1
    assert evaluate_equation("2**-2*(4/1)", numeric="exact") == 1
    assert evaluate_equation("4**.5", numeric="exact") is None
    assert evaluate_equation("(1/3)**9999", numeric="exact") is None
    for text, target in (("1/10", 0.1), ("10**1000", 10**1000), ("10**400*2", 2e400)):
        numbers = [int(run) for run in re.findall(r"\d+", text)]
        score = compute_score(answer(text), {"target": target, "numbers": numbers}, numeric="exact")
        assert score == (0.1 if target == math.inf else 1.0)


@pytest.mark.parametrize("text", ["-3+5", "3--5", "2**3", "7//2", "3*-5"])
def test_prompt_operators_only(text):
    assert evaluate_equation(text) is not None
    assert evaluate_equation(text, ops="prompt") is None
    assert evaluate_equation("(3-5)*2/4", ops="prompt") == -1


# Hostile input -----------------------------------------------------------------------------------

N = 200_000
HOSTILE = {
    "openings": "<answer>" * (N // 8),
    "closings": "</answer>" * (N // 9),
    "openings, then one closing": "<answer>" * (N // 8) + "</answer>",
    "an opening, then closings": "<answer>" + "</answer>" * (N // 9),
    "blocks": answer("1") * (N // 18),
    "digits": answer("1" * N),
    "numbers": answer("1 " * (N // 2)),
    "points": answer("." * N),
    "decimals": answer("1." * (N // 2)),
    "parentheses": answer("(" * N),
    "signs": answer("-" * N + "1"),
    "sum": answer("1+" * (N // 2) + "1"),
    "spaces": answer("1" + " " * N + "+1"),
    "powers": answer("9**999*" * (N // 7) + "1"),
    "tower": answer("9**" * 1900 + "9"),
    "work": answer("9**999*9**999//9**999//9**999*" * 99 + "1"),
    "literals": answer("*".join(["9" * 1000] * 200)),
    "fractions": answer("+".join(f"1/{n}" for n in range(2, 1400))),
    "fraction powers": answer("+".join(f"(1/{n})**400" for n in range(2, 700))),
    "lines": "\n" * N,
    "markers": "Assistant:" * (N // 10),
    "near misses": "<answer>1+1</answe><answer 1</answer" * (N // 40),
    "nested blocks": "<answer>" * (N // 17) + "1" + "</answer>" * (N // 17),
    "blocks on lines": (answer("1+1") + "\n") * (N // 21),
    "pairs of parentheses": answer("(" * (N // 2 - 10) + "1" + ")" * (N // 2 - 10)),
    "alternating signs": answer("+-" * (N // 2 - 10) + "1"),
    "signs of powers": answer("-2**" * 1400 + "1"),
    "towers": answer("2**2**2**2**2+" * (N // 14) + "1"),
    "astral": answer("1🎲" * (N // 2 - 10)),
    "digits of other scripts": answer("٣+" * (N // 2 - 10)),
    "long numbers": answer("+".join(["9" * 4300] * 46)),
    "prose": answer("three and four " * (N // 15 - 2)),
}
LITTER = [
    *(
        "<answer>",
        "</answer>",
        "<answer",
        "\n",
        "\r",
        "Assistant:",
        " ",
        "\t",
        "\x0b",
        "\u2028",
        "é",
    ),
    *("(", ")", "()", "+", "-", "*", "/", "//", "**", ".", "=", "0", "1", "12", "9" * 50, "1/7"),
    *("9" * 4300, "9**999", "(1/3)", "(1/9**600)", "2**64", "0.5", "٣", "🎲", "\ud800", "\0", "x"),
]
OPTIONS = [
    {},
    {"numeric": "exact", "extract": "last_block"},
    {"ops": "prompt", "use_all": False},
    {"allow_decimals": True, "use_all": False},
]


def cpu_seconds(work):
    """Of the fastest of a few calls: what is slow once is the machine."""
    spent = []
    while len(spent) < 4 and min(spent, default=math.inf) > 0.02:
        started = time.process_time()
        work()
        spent.append(time.process_time() - started)
    return min(spent)


def takes_little(text):
    # As many numbers as the answer has, so that no cheap check ends it early.
    numbers = re.findall(r"[0-9]{1,4300}", (extract_solution(text, "last_block") or ""))
    ground_truth = {"target": 2, "numbers": [int(n) for n in numbers]}
    said = Sample(id="a", problem=ground_truth, turn="answer", number=1, response=text)
    assert len(text) <= N
    for options in OPTIONS:
        assert compute_score(text, ground_truth, **options) in (0.0, 0.1, 1.0)
        assert cpu_seconds(lambda: compute_score(text, ground_truth, **options)) < 0.05  # noqa: B023
    assert cpu_seconds(lambda: CountdownScore().score(said)) < 0.05


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_takes_long(name):
    takes_little(HOSTILE[name][:N])


@settings(max_examples=40)
@given(
    parts=st.lists(st.sampled_from(LITTER), min_size=1, max_size=4),
    size=st.sampled_from([3000, 30_000, N]),
    inside=st.booleans(),
)
def test_no_litter_takes_long(parts, size, inside):
    part = "".join(parts)
    text = part * ((size - 17) // len(part))
    takes_little(answer(text) if inside else text)


@given(st.text(max_size=60))
def test_no_text_makes_it_raise(text):
    for response in (text, answer(text)):
        assert compute_score(response, {"target": 1, "numbers": [1]}) in (0.0, 0.1, 1.0)


# The plugins -------------------------------------------------------------------------------------


def sample(response, **problem):
    problem = {"numbers": [3, 4], "target": 7} | problem
    return Sample(id="a", problem=problem, turn="answer", number=1, response=response)


def test_the_plugins_are_rewards():
    assert isinstance(CountdownScore(), RewardPlugin)
    assert isinstance(CountdownVerify(), RewardPlugin)


@pytest.mark.parametrize(
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
    generous = {"format_score": 1.0}
    assert CountdownScore(**generous).score(sample(answer("3-4"))).value == 1.0
    assert CountdownVerify(**generous).score(sample(answer("3-4"))).value == 0.0
    assert CountdownVerify(**generous).score(sample(answer("3+4"))).value == 1.0
    assert CountdownVerify(ops="prompt").score(sample(answer("-3+4"), target=1)).value == 0.0


@pytest.mark.parametrize(
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
    with pytest.raises(ValueError, match="numbers"):
        CountdownScore().score(
            Sample(id="a", problem={"target": 7}, turn="answer", number=1, response="")
        )


def test_the_function_lets_a_bad_ground_truth_pass_as_the_source_does():
    for ground_truth in ({"numbers": ["3", "4"], "target": 7}, {"numbers": [3, 4], "target": None}):
        assert compute_score(answer("3+4"), ground_truth) == 0.1


# Speed -------------------------------------------------------------------------------------------


def answers(equations, thought=""):
    """Each equation as an answer with the numbers it uses."""
    return [
        (thought + answer(e), {"target": 9, "numbers": [int(n) for n in re.findall(r"\d+", e)]})
        for e in equations
    ]


@pytest.mark.parametrize(
    ("options", "factor"),
    [({"allow_decimals": True}, 2), ({}, 1.25)],  # 2.3 and 1.6 when nothing disturbs it
    ids=["the source's rule", "rationals"],
)
def test_faster_than_regular_expressions_and_eval(options, factor):
    equations = [
        f"{a} {o} ({b} {p} {c}) + {a + b}"
        for a, b, c in ((3, 25, 7), (61, 4, 12))
        for o, p in itertools.product("+-*/", repeat=2)
    ]
    rows = answers(equations, "<think>" + "17 + 4 = 21, no. " * 15 + "</think>\n") * 5
    scored = partial(compute_score, **options)
    assert [scored(*row) for row in rows] == [literal_score(*row) for row in rows]
    times = {literal_score: math.inf, scored: math.inf}
    for _ in range(60):
        for scorer in times:
            started = time.process_time()
            for row in rows:
                scorer(*row)
            times[scorer] = min(times[scorer], time.process_time() - started)
    assert times[literal_score] / times[scored] > factor
