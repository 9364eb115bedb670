"""Which groups of a first contact can teach the model something."""

import pytest
import yaml
from rows import each_row
from trees import entry, tree, turn

from rlx.evaluation import describe_first_contact
from rlx.phase_setup import build_setup
from rlx.plan import read_spec
from rlx.reward import RewardTable

SPEC = {
    "name": "contact",
    "model": {"kind": "tiny"},
    "task": {"plugin": "countdown", "numbers": [2]},
    "rollout": {
        "schedule": "single",
        "num_generations_answer": 2,
        "answer": {"max_new_tokens": 8, "spans": ["answer"]},
    },
    "rewards": {"turn": {"accuracy": {"plugin": "countdown.verify", "turn": "answer"}}},
    "mask": {"strategy": "turn_spans"},
    "phases": [{"name": "only", "steps": 1}],
}


@pytest.fixture
def contact(tmp_path):
    def contact(estimator, *scores, **sections):
        path = tmp_path / "contact.yaml"
        path.write_text(yaml.safe_dump({**SPEC, "estimator": estimator, **sections}))
        setup = build_setup(read_spec(path).spec)
        said = turn(0, "<answer>1</answer>", answer="1")
        trees = [tree(*[said] * len(own), name=f"p{n}") for n, own in enumerate(scores)]
        entries = {
            (t, s): {"accuracy": entry("accuracy", score)}
            for t, own in enumerate(scores)
            for s, score in enumerate(own, start=1)
        }
        table = RewardTable(entries, frozenset(), {})
        return describe_first_contact(setup, trees, table, lambda ids: "?\x1b[2J")

    return contact


@each_row(
    ("estimator", "scores", "with_signal"),
    [
        ({"name": "grpo"}, ([0.0, 1.0], [0.0, 0.0]), 1),
        ({"name": "grpo"}, ([0.0, 0.0], [1.0, 1.0]), 0),
        ({"name": "grpo", "singleton": "raw"}, ([0.0, 0.0], [1.0, 1.0]), 0),
        ({"name": "remax"}, ([0.0, 0.0], [1.0, 1.0]), 2),
        ({"name": "remax"}, ([1.0, 1.0], [1.0, 1.0]), 0),
    ],
)
def test_a_group_has_a_signal_if_the_scores_that_are_compared_differ(
    contact, estimator, scores, with_signal
):
    found = contact(estimator, *scores)
    assert (found.groups["answer"].groups, found.groups["answer"].with_signal) == (2, with_signal)
    assert found.has_signal == (with_signal > 0)
    lines = found.list_lines()
    assert f"  {with_signal} of 2 answer groups have a signal" in lines
    assert lines.count("      | ?\\x1b[2J") > 1, "what a model wrote is escaped"
    if scores == ([1.0, 1.0], [1.0, 1.0]):
        assert found.advice == ["accuracy is 1 for all: take problems that some answers solve"]


def test_every_group_has_a_signal_from_a_teacher(contact):
    teacher = {"kind": "tiny", "reference": {"path": "./teacher"}}
    loss = {"kl": {"coefficient": 1}}
    for scores in ([0.0, 0.0], [None, None]):
        found = contact({"name": "grpo"}, scores, scores, model=teacher, loss=loss, rewards={})
        assert (found.groups["answer"].groups, found.groups["answer"].with_signal) == (2, 2)
