"""Plugins made of plugins: a reward for each source, a mixture of tasks, and their errors."""

import json
from collections import Counter

import pytest
from trees import turn

from rlx.discovery import build_plugin, resolve_plugins
from rlx.plan import check_file
from rlx.plugin import Problem
from rlx.reward import NamedReward, RewardPool, score_rollouts
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx.spec import PluginUse, TurnReward
from rlx_plugins.countdown import CountdownTask

SOURCES = {
    "countdown": {"plugin": "countdown.verify"},
    "capitals": {"plugin": "exact_match", "normalize": "text"},
}
EASY = {"plugin": "countdown", "numbers": [2], "number_range": [1, 9]}
HARD = {"plugin": "countdown", "numbers": [3], "number_range": [10, 20], "held_out": 3}


def mixture(**options):
    return build_plugin(
        PluginUse(plugin="mixture", tasks={"easy": EASY, "hard": HARD}, **options), "task"
    )


def by_source():
    return build_plugin(PluginUse(plugin="by_data_source", sources=SOURCES), "reward")


def tree(name, fields, *answers):
    root = Segment(parent=NO_PARENT, author="prompt", token_ids=(1,))
    said = tuple(turn(0, f"<answer>{answer}</answer>", answer=answer) for answer in answers)
    return RolloutTree(Problem(id=name, prompt="?", fields=fields), (root, *said))


SUM = {"data_source": "countdown", "numbers": [3, 4], "target": 7}
CAPITAL = {"data_source": "capitals", "answer": ["Paris", "3+4"]}


def test_every_row_of_a_mixed_batch_is_scored_by_its_own_source():
    trees = [
        tree("sum", SUM, "3+4", "3*4", "Paris"),
        tree("capital", CAPITAL, "paris!", "London"),
        tree("stray", {"data_source": "poems", "answer": "3+4"}, "3+4"),
        tree("bare", {"answer": "3+4"}, "3+4"),
    ]
    use = TurnReward(plugin="by_data_source", turn="answer", on_error="drop_sample")
    with RewardPool(workers=1, memory_mb=512) as pool:
        table = score_rollouts(trees, [NamedReward("accuracy", use, by_source())], pool)
    entries = {place: rewards["accuracy"] for place, rewards in table.turns.items()}
    assert {place: e.raw for place, e in entries.items()} == {
        (0, 1): 1.0,
        (0, 2): 0.0,
        (0, 3): 0.0,
        (1, 1): 1.0,
        (1, 2): 0.0,
        (2, 1): None,
        (3, 1): None,
    }
    assert entries[0, 2].reason == "wrong value" and entries[1, 2].reason == "wrong answer"
    assert entries[2, 1].reason == (
        "ValueError: data_source is 'poems'; there are rewards for ['capitals', 'countdown']"
    )
    assert entries[3, 1].reason.startswith("ValueError: data_source is None")
    assert table.dropped == {(2, 1), (3, 1)}


def test_weights_are_relative_frequencies():
    def shares(task, split):
        names = Counter(task.problem(split, i, 7).id.partition("/")[0] for i in range(600))
        return {name: count / 600 for name, count in names.items()}

    for split in ("train", "test"):
        drawn = shares(mixture(weights={"easy": 3, "hard": 1}), split)
        assert drawn == {
            "easy": pytest.approx(0.75, abs=0.06),
            "hard": pytest.approx(0.25, abs=0.06),
        }
    assert shares(mixture(), "train")["easy"] == pytest.approx(0.5, abs=0.06)
    assert shares(mixture(weights={"easy": 0, "hard": 2}), "train") == {"hard": 1.0}


def test_each_task_gives_its_own_problems_in_its_own_order():
    task = mixture()
    drawn = [task.problem("train", i, 7) for i in range(40)]
    for name, options in (("easy", EASY), ("hard", HARD)):
        own = build_plugin(PluginUse(**options), "task")
        mine = [p for p in drawn if p.id.startswith(f"{name}/")]
        for i, problem in enumerate(mine):
            expected = own.problem("train", i, 7)
            assert problem.id == f"{name}/{expected.id}"
            assert (problem.prompt, problem.fields) == (expected.prompt, expected.fields)
            assert problem.stratum == f"{name}: {expected.stratum}"
            assert task.demonstration(problem, 5) == own.demonstration(expected, 5)


def test_a_draw_is_the_same_however_the_names_are_ordered():
    swapped = build_plugin(PluginUse(plugin="mixture", tasks={"hard": HARD, "easy": EASY}), "task")
    assert [swapped.problem("test", i, 1) for i in range(30)] == [
        mixture().problem("test", i, 1) for i in range(30)
    ]
    other = [mixture().problem("train", i, 2).id for i in range(30)]
    assert other != [mixture().problem("train", i, 1).id for i in range(30)]


def test_a_problem_has_the_data_source_of_its_task_or_else_its_name_in_the_mixture(tmp_path):
    for name in ("a", "b"):
        rows = [json.dumps({"prompt": f"{name}{n}"}) for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    data = {
        name: {"plugin": "dataset", "train": {"path": str(tmp_path / f"{name}.jsonl")}}
        | {"held_out": 0.5}
        for name in ("a", "b")
    }
    task = build_plugin(PluginUse(plugin="mixture", tasks={**data, "sums": EASY}), "task")
    drawn = [task.problem("test", i, 0) for i in range(60)]
    for problem in drawn:
        name = problem.id.partition("/")[0]
        assert problem.fields["data_source"] == {"sums": "countdown"}.get(name, name)
    assert {p.stratum for p in drawn} == {"a", "b", "sums: 2 numbers"}


SPEC = """\
name: composed
model: {kind: tiny}
task:
  plugin: mixture
  tasks: {easy: {plugin: countdown}, hard: {plugin: countdown}}
rollout: {schedule: single}
rewards:
  turn:
    accuracy:
      plugin: by_data_source
      turn: answer
      sources: {countdown: {plugin: countdown.verify}, gsm8k: {plugin: exact_match}}
phases: [{name: all, steps: 3}]
"""


def test_an_experiment_names_the_plugins_inside_its_plugins(tmp_path):
    (tmp_path / "composed.yaml").write_text(SPEC)
    read, plugins = check_file(tmp_path / "composed.yaml")
    assert isinstance(plugins.task.inner("tasks")["hard"], CountdownTask)
    assert list(plugins.rewards["turn", "accuracy"].inner("sources")) == ["countdown", "gsm8k"]
    named = [(p.kind, p.name) for p in plugins.provenance]
    assert named[:3] == [("task", "mixture"), ("task", "countdown"), ("task", "countdown")]
    for name in ("by_data_source", "countdown.verify", "exact_match"):
        assert ("reward", name) in named
    assert resolve_plugins(read.spec).provenance == plugins.provenance


def test_checking_reaches_what_is_inside(tmp_path):
    data = {"plugin": "dataset", "train": {"path": str(tmp_path / "no.jsonl")}, "held_out": 0.5}
    task = build_plugin(PluginUse(plugin="mixture", tasks={"data": data, "easy": EASY}), "task")
    with pytest.raises(OSError, match=r"cannot read .*no\.jsonl"):
        task.check()
    mixture().check()
    by_source().check()


def test_a_source_may_not_look_at_several_samples(monkeypatch):
    reward = by_source()
    monkeypatch.setattr(type(reward.inner("sources")["capitals"]), "scope", "siblings")
    with pytest.raises(ValueError, match="reward of 'capitals' looks at siblings"):
        reward.check()
