"""Labels of rows: whether what a row states was right."""

import math

import pytest
from trees import turn

from rlx.assignment import join_row_rewards
from rlx.batch import build_token_batch
from rlx.plugin import Problem
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, RolloutTree, Segment


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({1: 1.0, 2: 0.0}, 0.0),
        ({1: 0.0, 2: 1.0}, 1.0),
        ({1: 1.0}, 1.0),
        ({1: 0.0, 2: None}, 0.0),
        ({}, math.nan),
    ],
)
def test_a_label_is_the_value_at_the_nearest_turn_that_has_one(values, label):
    """Two answers, and a confidence after them that has no value of its own."""
    segments = (
        Segment(parent=NO_PARENT, author="prompt", token_ids=(1,)),
        turn(0, kind="answer", number=1),
        turn(1, kind="answer", number=2),
        turn(2, kind="confidence", number=3),
    )
    tree = RolloutTree(Problem(id="p", prompt="", fields={}), segments)
    entries = {
        (0, segment): {
            "accuracy": RewardEntry("accuracy", value, 1.0, "absent" if value is None else "scored")
        }
        for segment, value in values.items()
    }
    table = RewardTable(entries, frozenset(), {})
    batch = build_token_batch([tree])
    rows = join_row_rewards(batch, [tree], table, batch.is_own, label="accuracy")
    assert rows.rewards.labels.tolist() == pytest.approx([label], nan_ok=True)
