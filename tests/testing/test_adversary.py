"""The adversarial search: what it finds, what it lets pass, and what it costs."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from unittest import SkipTest

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # other processes inherit it

import gamed_rewards as gamed

from rlx.cli.plugins import _check_one_promise
from rlx.discovery import list_installed_plugins, load_plugin
from rlx.testing import FindsToJudge, reward_checks
from rlx.testing.adversary import (
    MUTATIONS,
    list_pieces,
    list_seed_texts,
    mutate_text,
    report_adversarial_texts,
    search_adversarial_texts,
)
from rlx.testing.promise import build_subject_plugin
from rlx_plugins.countdown import CountdownArithmetic, CountdownScore, CountdownVerify

ELSEWHERE = {"command", "judge", "judge.rank", "python_tests"}
"""Start programs or ask servers: tests/system tries them with hostile ones."""
REWARDS = [
    f.name
    for f in list_installed_plugins()
    if (f.kind, f.distribution) == ("reward", "rlx") and f.name not in ELSEWHERE
]
BY_FORM = {"kg.format", "repetition", "rlcr.format", "rlcr.confidence"}
"""Rewards that look at a text's form alone, and pay every text of that form."""


def build_reward(name):
    cls = load_plugin("reward", name)
    examples = cls.examples
    return build_subject_plugin(cls, examples[0].options if examples else None)


# What rlx ships ----------------------------------------------------------------------------------


def test_no_shipped_reward_pays_in_full_without_a_solution(subtests):
    for name in REWARDS:
        with subtests.test(name=name):
            report = search_adversarial_texts(build_reward(name), budget=600, seconds=10, seed=1)
            assert report is not None
            assert report.calls > 0
            assert (report.faults, report.outside) == ((), ())
            paid = None if report.paid_in_full is None else report.paid_in_full.text
            if name in BY_FORM:
                assert paid is not None
                assert not report.reads_problem
            else:
                assert paid is None


def test_the_rules_that_warn_are_gamed(monkeypatch, subtests):
    """The examples of the default rule, searched under the other."""
    for cls, options in (
        (CountdownScore, {"allow_decimals": True}),
        (CountdownVerify, {"allow_decimals": True}),
        (CountdownScore, {"numeric": "float64", "ops": "python"}),
    ):
        with subtests.test(cls=cls, options=options), monkeypatch.context() as monkeypatch:
            defaults = tuple(e for e in cls.examples if not e.options)
            monkeypatch.setattr(cls, "examples", tuple(_with_options(e, options) for e in defaults))
            report = search_adversarial_texts(cls(**options))
            assert report.judged
            assert report.paid_in_full is not None
            assert cls(**options).score(report.paid_in_full.sample).value == 1.0
            assert cls().score(report.paid_in_full.sample).value < 1.0


def _with_options(example, options):
    return replace(example, options=options)


def test_identities_are_not_paid_any_more():
    texts = list_seed_texts(["3*4=12\n"], {"numbers": [2, 3, 4]})
    assert "1=1" in texts
    report = search_adversarial_texts(CountdownArithmetic())
    assert report.finds == ()


# What it finds -----------------------------------------------------------------------------------


def test_an_honest_reward_pays_nothing():
    report = search_adversarial_texts(gamed.Honest(), budget=400)
    assert report.finds == ()
    assert report.reads_problem
    assert not report.judged


def test_what_is_paid_on_every_problem_is_found():
    report = search_adversarial_texts(gamed.ByForm(), budget=400)
    assert report.paid_in_full is not None
    assert not report.reads_problem
    (head, columns, row) = report_adversarial_texts(gamed.ByForm())
    assert "no value depended on the problem" in head
    assert columns.split() == ["SCORE", "FOUND", "BY", "TEXT"]
    assert row.split()[0] == "1"


def test_mutation_climbs():
    examples = gamed.ByGreatNumber.examples
    given = list_seed_texts([e.sample.response for e in examples], examples[0].sample.problem)
    report = search_adversarial_texts(gamed.ByGreatNumber(), budget=2000)
    best = report.finds[0]
    assert best.origin in MUTATIONS
    assert best.text.count("1") >= 2 * max(text.count("1") for text in given)


def test_the_same_seed_finds_the_same():
    one, other = (search_adversarial_texts(gamed.ByGreatNumber(), seed=3) for _ in range(2))
    assert one == other
    assert one != search_adversarial_texts(gamed.ByGreatNumber(), seed=4)


def test_calls_are_bounded(subtests):
    for budget in (30, 200):
        with subtests.test(budget=budget):
            assert 0 < search_adversarial_texts(gamed.Honest(), budget=budget).calls <= budget


# The promise -------------------------------------------------------------------------------------


def test_a_find_that_breaks_a_promise_fails_the_check(subtests):
    for cls, why in (
        (gamed.Judged, "is no solution"),
        (gamed.Beyond, "outside its value_range"),
        (gamed.Fragile, "ZeroDivisionError"),
    ):
        with subtests.test(cls=cls, why=why):
            (check,) = [c for c in reward_checks() if c.name == "pays only for solutions"]
            with pytest.raises(AssertionError, match=why):
                check(cls)


def test_a_find_that_breaks_no_promise_is_shown():
    (check,) = [c for c in reward_checks() if c.name == "pays only for solutions"]
    found, none = check(gamed.ByForm), check(gamed.Honest)
    assert (len(found), len(none)) == (3, 1)
    assert isinstance(found, FindsToJudge) and not isinstance(none, FindsToJudge)
    verdict = _check_one_promise(check, gamed.ByForm)
    assert (verdict.state, verdict.why, verdict.notes) == (
        "open",
        "judge what was found",
        tuple(found),
    )
    assert _check_one_promise(check, gamed.Honest).state == "kept"


def test_without_examples_there_is_nothing_to_search_with():
    class Bare(gamed.Honest):
        """Has no examples."""

        examples = ()

    with pytest.raises(SkipTest, match="give it examples"):
        report_adversarial_texts(Bare())


# Parts -------------------------------------------------------------------------------------------


def test_every_mutation_changes_some_text(subtests):
    for name in MUTATIONS:
        with subtests.test(name=name):
            responses = ["<think>3*4=12</think><answer>3*4-2</answer>"]
            pieces = list_pieces(responses, {"numbers": [2, 3, 4], "target": 10})
            changed = {
                MUTATIONS[name](responses[0], ["<answer>7</answer>"], pieces, random.Random(seed))
                for seed in range(20)
            }
            assert changed - set(responses)
            text, origin = mutate_text("", ["a"], pieces, random.Random(0))
            assert isinstance(text, str)
            assert origin in MUTATIONS
