"""What cannot stand together, beyond the cases under bad/."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import each_row

from rlx.plan import read_spec
from rlx.plan.checks import check_spec_tree
from rlx.spec.contradictions import find_cautions
from rlx.spec.reading.diagnostics import InvalidSpec

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"


def check(**changes):
    """A small experiment with these sections, and its contradictions."""
    said = {
        "name": "x",
        "model": {"kind": "tiny"},
        "task": {"plugin": "t"},
        "rewards": {"turn": {"accuracy": {"plugin": "r", "turn": "answer"}}},
        "phases": [{"name": "all", "steps": 3}],
    }
    return check_spec_tree({**said, **changes})


NAMES = st.sampled_from("abcd")


@settings(max_examples=150)
@given(
    reads=st.dictionaries(
        NAMES, st.fixed_dictionaries({}, optional={"of": NAMES, "requires": NAMES})
    )
)
def test_a_circle_is_told_exactly_where_no_order_of_scoring_exists(reads):
    rewards = {n: {"plugin": "r", "turn": "answer", **reads.get(n, {})} for n in "abcd"}
    _, found = check(rewards={"turn": rewards}, evaluation={"correct": "a"})
    messages = [p.message for p in found if "cycle" in p.message]
    told = [message.partition(": ")[2].split(" → ") for message in messages]
    edges = {n: {o for o in reads.get(n, {}).values() if o != n} for n in "abcd"}
    for circle in told:
        assert circle[0] == circle[-1]
        assert all(after in edges[name] for name, after in pairwise(circle))
    assert len({n for circle in told for n in circle}) == sum(len(c) - 1 for c in told)
    left = {n: edges[n] for n in "abcd" if not any(n in circle for circle in told)}
    while ready := [n for n in left if not edges[n] & left.keys()]:
        left = {n: e for n, e in left.items() if n not in ready}
    assert not left


def refused(*overrides):
    with pytest.raises(InvalidSpec) as caught:
        read_spec(RLCR, overrides)
    return {d.path: d for d in caught.value.diagnostics}


def test_where_the_key_is_not_in_the_file_the_one_it_does_not_fit_is_shown():
    told = refused("model.max_position=70", "rollout.confidence.max_new_tokens=40")
    assert told["model", "max_position"].position.text == "model.max_position=70"
    told = refused("rollout.confidence.max_new_tokens=2040")
    position = told["model", "max_position"].position
    assert position.text == "rollout.confidence.max_new_tokens=2040"


@each_row(
    ("settings", "lost"),
    [
        ({"loss": {"clip": [0.1, 0.2]}}, ["aggregate, per_turn of it have their defaults"]),
        ({"loss": {"clip": [0.1, 0.2]}, "loss.per_turn": False}, ["aggregate of it has its"]),
        ({"loss": {"aggregate": "token_mean", "per_turn": False}}, []),
        ({"loss.per_turn": False}, []),
        ({"loss": {"clip": 3}}, []),
    ],
)
def test_a_phase_that_puts_other_values_back_to_defaults_is_warned_of(settings, lost):
    phases = [{"name": "first", "steps": 3, "set": settings}]
    spec, _ = check(loss={"aggregate": "sequence_sum", "per_turn": True}, phases=phases)
    found = [w for w in find_cautions(spec) if "replaces the whole section" in w.message]
    assert [w.path for w in found] == [("phases", 0, "set", "loss")] * len(lost)
    assert all(part in w.message for part, w in zip(lost, found, strict=True))
