"""`countdown.arithmetic`: in a right answer, the share of the written sums that are true."""

import pytest
from rows import each_row

from rlx.plugin import Sample
from rlx_plugins.countdown import CountdownArithmetic


def score(think: str, *, of: float | None = 1.0, numbers=(1, 1, 2, 3, 4, 5, 6)):
    problem = {"numbers": list(numbers), "target": 17}
    spans = {"think": think}
    sample = Sample(
        id="0", problem=problem, turn="answer", number=1, response="", spans=spans, of=of
    )
    return CountdownArithmetic().score(sample)


@each_row(
    ("think", "value", "reason"),
    [
        ("3*5=15\n15+2=17\n", 1.0, None),
        ("6/4=1.5\n", 1.0, None),
        ("2-5=-3\n-3+6=3\n", 1.0, None),
        ("3+5=8\n3*5=15\n15+2=17\n", 1.0, None),  # a sum tried and dropped
        ("3*5=14\n15+2=17\n", 0.0, "false sums"),  # 15 is no number of the problem, nor a result
        ("3*5=14\n14+2=16\n", 0.0, "false sums"),  # goes on from a false result
        ("3+5=8\n8+8=16\n", 0.5, "false sums"),  # there is one 8
        ("2+2=4\n", 0.0, "false sums"),  # there is one 2
        ("7+8=15\n", 0.0, "false sums"),  # neither is given
        ("3+5=8\n1=1\n", 0.5, "false sums"),
        ("+1=1\n", 0.0, "false sums"),
        ("3+5=3+5\n", 0.0, "false sums"),
        ("3+5=(8)\n", 0.0, "false sums"),
        ("2.5*4=10\n", 0.0, "false sums"),
        ("3=3=3\n", 0.0, "no sums"),
        ("", 0.0, "no sums"),
        ("9**9**9**9=1\n", 0.0, "false sums"),
        ("1/0=1\n", 0.0, "false sums"),
        ("0**-1=0\n2+1=3\n", 0.5, "false sums"),
        ("1+" * 200 + "0=200\n", 0.0, "false sums"),
        ("1+1=2\n" * 30_000, 1.0, None),  # the first lines alone are read
        ("1+1=2\n" * 63 + "1+1=3\n" * 1000, 63 / 64, "false sums"),
        ("9" * 200_000 + "=1", 0.0, "false sums"),
        ("(" * 200_000 + "=1", 0.0, "false sums"),
        (("+".join(["1/9973"] * 440) + "=1\n") * 64, 0.0, "false sums"),
        (("9/" * 1500 + "9=1\n") * 64, 0.0, "false sums"),
        (("9**400/7**400-" * 220 + "1=1\n") * 64, 0.0, "false sums"),
    ],
)
def test_the_share_of_true_sums_over_the_problems_numbers(think, value, reason):
    verdict = score(think)
    assert (verdict.value, verdict.reason) == (value, reason)


def test_a_problem_without_numbers_is_an_error_in_the_data():
    with pytest.raises(ValueError, match="numbers must be a list"):
        score("3+5=8\n", numbers=("3", "5"))


def test_a_wrong_answer_gains_nothing_by_easy_sums():
    for of in (0.0, 0.5):
        verdict = score("1+1=2\n", of=of)
        assert (verdict.value, verdict.reason) == (0.0, "wrong answer")
