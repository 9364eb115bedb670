"""Figures of rollouts with an environment, worked by hand, and of info that means harm."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given
from trees import conversation, tree

from rlx.record.tracker import make_legal_key
from rlx.rollout import Segment
from rlx.run.metrics import MOST_KEYS, MOST_VALUES, environment_figures


def one(*infos):
    """Figures of one rollout whose turns report this."""
    return environment_figures([conversation([("query", "q", info, "o") for info in infos])])


def test_two_rollouts_by_hand():
    both = conversation(
        [
            ("query", "aaaa", {"valid": True, "hits": 3, "error": "NONE"}, "seen"),
            ("query", "aa", {"valid": False, "error": "NOT_FOUND"}, "saw"),
            ("answer", "a", {"answered": True}, None),
        ],
        [("query", "aaaaa", {"valid": True, "error": "NONE"}, "12345")],
    )
    found = environment_figures([both])
    assert found == pytest.approx(
        {
            "environment/turns": 2.0,
            "environment/turns_max": 3.0,
            "environment/tokens_per_turn": 12 / 4,
            "environment/token_share": 7 / 19,  # what nobody was shown is no part of a response
            "environment/finished": 0.5,
            "environment/faults": 0.0,
            "environment/turn/query": 0.75,
            "environment/turn/answer": 0.25,
            "environment/info/valid": 2 / 3,
            "environment/info/hits": 3.0,
            "environment/info/error/NONE": 2 / 3,
            "environment/info/error/NOT_FOUND": 1 / 3,
            "environment/info/answered": 1.0,
        }
    )


def test_a_rollout_that_is_done_at_once_counts_and_a_plain_answer_has_no_environment():
    done = conversation([("answer", "a", {"answered": True}, None)])
    assert environment_figures([done])["environment/finished"] == 1.0
    assert environment_figures([conversation([("answer", "a", {}, None)])]) == {}


def test_an_environment_that_failed_before_the_first_turn_leaves_no_figures():
    fault = Segment(parent=0, author="environment", token_ids=(), info={"fault": "no"})
    assert environment_figures([tree(fault)]) == {}


def test_values_and_keys_are_few():
    found = one(*({"word": f"w{n:03}", "often": "x"} for n in range(100)))
    words = [name for name in found if name.startswith("environment/info/word/")]
    assert words == [f"environment/info/word/w{n:03}" for n in range(MOST_VALUES)]
    assert found["environment/info/often/x"] == 1.0
    wide = one({f"k{n:03}": 1 for n in range(200)})
    assert sum(name.startswith("environment/info/") for name in wide) == MOST_KEYS


def test_what_is_no_number_and_no_word_is_left_out():
    found = one(
        {"a": [1], "b": None, "c": {"d": 1}, "e": 10**400, "f": math.inf, "g": math.nan},
        {"text": "x" * 41},
        {"text": "y"},
    )
    assert [name for name in found if "/info/" in name] == ["environment/info/text/y"]
    assert found["environment/info/text/y"] == 0.5


JSON = st.text() | st.booleans() | st.integers() | st.floats() | st.none() | st.lists(st.text())


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=5), min_size=1, max_size=5))
def test_no_info_breaks_a_name_or_a_number(infos):
    found = one(*infos)
    assert all(math.isfinite(value) for value in found.values())
    for name in found:
        assert make_legal_key(name) == name and name.isascii() and name.isprintable()
