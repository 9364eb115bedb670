"""Experiments that extend another file, through the commands that read them."""

import json
from pathlib import Path

import pytest
import yaml

from rlx.cli import main
from rlx_registry import Registry

BASE = """\
name: base
model: {kind: tiny}
task: {plugin: countdown, numbers: {2: 1.0}}
rollout:
  schedule: two_turn
  confidence: {template: "sure?", spans: [confidence]}
rewards:
  turn:
    accuracy: {plugin: countdown.verify, turn: answer}
    brier: {plugin: rlcr.brier, turn: confidence, of: accuracy}
estimator:
  name: two_level
  lambda_conf: 0.5
evaluation: {problems: 30}
critic: null
phases:
  - {name: first, steps: 3}
  - {name: second, steps: 4}
"""
MIDDLE = """\
extends: base.yaml
optimizer: {learning_rate: 3.0e-5, schedule: linear}
"""
MINE = """\
# What this study changes.
extends: ../middle.yaml
name: mine
rewards: {turn: {brier: {weight: 0.5}}}
optimizer: {schedule: cosine}
evaluation: {problems: null}
phases: [{name: only, steps: 2}]
"""
WHOLE = """\
name: mine
model: {kind: tiny}
task: {plugin: countdown, numbers: {2: 1.0}}
rollout:
  schedule: two_turn
  confidence: {template: "sure?", spans: [confidence]}
rewards:
  turn:
    accuracy: {plugin: countdown.verify, turn: answer}
    brier: {plugin: rlcr.brier, turn: confidence, of: accuracy, weight: 0.5}
estimator: {name: two_level, lambda_conf: 0.5}
optimizer: {learning_rate: 3.0e-5, schedule: cosine}
phases: [{name: only, steps: 2}]
"""
REMOVING = """\
extends: middle.yaml
rollout: {schedule: single, confidence: null}
rewards: {turn: {brier: null}}
estimator: {name: grpo}
task: {plugin: countdown, numbers: {3: 1.0}}
"""


@pytest.fixture
def files(folder):
    (folder / "study").mkdir()
    for name, text in {
        "base.yaml": BASE,
        "middle.yaml": MIDDLE,
        "study/mine.yaml": MINE,
        "whole.yaml": WHOLE,
        "removing.yaml": REMOVING,
    }.items():
        (folder / name).write_text(text)
    return folder


def show(capsys, *arguments):
    assert main(["validate", "--values", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_value_comes_from_the_nearest_file_that_has_it(files, capsys):
    shown = show(capsys, "study/mine.yaml", "--set", "optimizer.warmup_steps=1")
    values, origins = shown["values"], shown["origins"]
    assert (values["name"], origins["name"]) == ("mine", "study/mine.yaml:3")
    rate = "optimizer.learning_rate"
    assert (values[rate], origins[rate]) == (3e-5, "middle.yaml:2")
    assert origins["optimizer.schedule"] == "study/mine.yaml:5"
    assert origins["rewards.turn.brier.weight"] == "study/mine.yaml:4"
    assert origins["rewards.turn.brier.of"] == "base.yaml:10"
    assert origins["optimizer.warmup_steps"] == "--set"
    assert values["evaluation.problems"] == 600 and origins["evaluation.problems"] == "default"
    assert values["critic"] is None and origins["critic"] == "base.yaml:15"
    assert [path for path in values if path.startswith("phases.1")] == [], "lists are replaced"
    assert "extends" not in shown["spec"]


def test_null_leaves_out_and_another_plugin_replaces_its_section(files, capsys):
    shown = show(capsys, "removing.yaml")
    assert "confidence" not in shown["spec"]["rollout"]
    assert list(shown["spec"]["rewards"]["turn"]) == ["accuracy"]
    assert shown["spec"]["estimator"]["name"] == "grpo"
    assert "lambda_conf" not in shown["spec"]["estimator"]
    assert shown["spec"]["task"]["numbers"] == {"2": 1.0, "3": 1.0}


def test_the_split_over_files_is_no_part_of_a_run(files, capsys):
    assert main(["submit", "study/mine.yaml", "--queue", "--quiet"]) == 0
    run_id = capsys.readouterr().out.split()[-1]
    assert main(["submit", "whole.yaml", "--queue"]) == 0
    assert f"is queued as {run_id}" in capsys.readouterr().out

    for name in ("base.yaml", "middle.yaml"):
        Path(name).unlink()
    assert main(["status", run_id, "--values", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["origins"]["optimizer.learning_rate"] == "middle.yaml:2"
    with Registry.open("sqlite:///home/registry.db", read_only=True) as registry:
        run = registry.run(run_id)
    texts = [MINE, MIDDLE, BASE]
    assert list(yaml.safe_load_all(run.yaml)) == [yaml.safe_load(text) for text in texts]
    assert "# What this study changes." in run.yaml
    assert (Path(run.directory) / "spec.yaml").read_text() == run.yaml


def test_an_example_is_extended_by_its_name(folder, capsys):
    Path("mine.yaml").write_text("extends: quick\nname: mine\n")
    origins = show(capsys, "mine.yaml")["origins"]
    assert origins["name"] == "mine.yaml:2"
    assert origins["model.kind"].startswith("example quick:")
    assert main(["validate", "mine.yaml", "--set", "model.layer=1"]) == 2
    assert "unknown key 'model.layer'" in capsys.readouterr().err
