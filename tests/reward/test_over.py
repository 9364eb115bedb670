"""Rewards that read others below them, or of the whole prompt."""

import pytest
from pools import InProcess
from rows import each_row
from trees import tree, turn

from rlx.plugin import Reward, Score
from rlx.reward import NamedReward, score_rollouts
from rlx.spec import TurnReward


class Number(Reward):
    """The number that a turn says; absent if it says none."""

    def score(self, sample):
        return Score(float(sample.response)) if sample.response else None


class Parent(Reward):
    """What `of` names."""

    def score(self, sample):
        return Score(sample.of)


def below(*answers):
    """Two confidences, and answers below each."""
    segments = []
    for texts in answers:
        segments.append(turn(0, kind="confidence"))
        above = len(segments)
        segments += [turn(above, text, number=2) for text in texts]
    return tree(*segments)


def read_values(over, *trees, turn="answer"):
    use = TurnReward(plugin="parent", turn="confidence", of="accuracy", over=over)
    rewards = [
        NamedReward("accuracy", TurnReward(plugin="number", turn=turn), Number()),
        NamedReward("brier", use, Parent()),
    ]
    table = score_rollouts(trees, rewards, InProcess())
    return [
        entries["brier"].raw for place, entries in sorted(table.turns.items()) if "brier" in entries
    ]


@each_row(
    ("over", "values"),
    [
        ("below", [0.5, 1.0, None, 0.25]),
        ("prompt", [2 / 3, 2 / 3, 0.25, 0.25]),
        ("path", [None, None, None, None]),
    ],
)
def test_a_turn_reads_the_mean_over_those_below_it_or_of_its_prompt(over, values):
    trees = below(["0", "1"], ["1", ""]), below([""], ["0", "0.5"])
    assert read_values(over, *trees) == pytest.approx(values)


def test_below_leaves_the_turn_itself_out():
    """`accuracy` is on every turn, that of the reading one included."""
    own = turn(0, "1", kind="confidence"), turn(1, "0", number=2), turn(1, "0.5", number=2)
    assert read_values("below", tree(*own), turn="*") == pytest.approx([0.25])
