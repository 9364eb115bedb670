"""`countdown.arithmetic`: in a right answer, the share of the written sums that are true."""

import time

import pytest

from rlx.plugin import Sample
from rlx_plugins.countdown import CountdownArithmetic


def score(think: str, *, of: float | None = 1.0, **options):
    sample = Sample(
        id="0", problem={}, turn="answer", number=1, response="", spans={"think": think}, of=of
    )
    return CountdownArithmetic(**options).score(sample)


@pytest.mark.parametrize(
    ("think", "expected"),
    [
        ("3*5=15\n15+2=17\n", 1.0),
        ("3*5=14\n15+2=17\n", 0.5),
        ("let me see\n3*5=15\nso it is", 1.0),
        ("6/4=1.5\n", 1.0),
        ("3=3=3\n", 0.0),
        ("x=3\n", 0.0),
        ("=\n", 0.0),
        ("", 0.0),
        ("9**9**9**9=1\n", 0.0),
        ("1/0=1\n", 0.0),
        ("0**-1=0\n2+2=4\n", 0.5),
        ("9.0**999=1\n", 0.0),
        ("1+" * 200 + "0=200\n", 0.0),
    ],
)
def test_counts_true_sums(think, expected):
    assert score(think).value == expected


@pytest.mark.parametrize("of", [0.0, 0.5])
def test_a_wrong_answer_gains_nothing_by_easy_sums(of):
    verdict = score("1+1=2\n", of=of)
    assert (verdict.value, verdict.reason) == (0.0, "wrong answer")


def test_reads_so_many_lines_and_no_more():
    assert score("1+1=2\n" + "1+1=3\n" * 9, max_lines=1).value == 1.0
    assert score("1+1=2\n" * 63 + "1+1=3\n" * 1000).value == 63 / 64


SUMS = ["+".join(["1/9973"] * 440), "9/" * 1500 + "9", "9**400/7**400-" * 220 + "1"]


@pytest.mark.parametrize(
    "text",
    [
        "1+1=2\n" * 30_000,
        "9" * 200_000 + "=1",
        "(" * 200_000 + "=1",
        *(f"{text}=1\n" * 64 for text in SUMS),
    ],
)
def test_hostile_text_costs_little(text):
    began = time.process_time()
    score(text)
    assert time.process_time() - began < 0.05
