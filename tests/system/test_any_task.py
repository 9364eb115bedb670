"""A task in English on a tiny model, with a prompt too long for it: trained, resumed and forked."""

import json
from pathlib import Path

import pytest

from rlx.model import Vocabulary

YAML = """\
name: english
model:
  kind: tiny
  hidden_size: 32
  heads: 1
  kv_heads: 1
  layers: 1
  intermediate_size: 32
  max_position: 96
  warm_start:
    steps: 5
    batch_size: 4
    warmup_steps: 2
    demonstrations:
      plugin: dataset
      train: {path: worked.jsonl}
      held_out: 0.2
      prompt: "{question}"
      demonstrations: ["{worked}"]
task:
  plugin: dataset
  train: {path: questions.jsonl}
  held_out: 0.2
  prompt: "{question}"
rollout:
  schedule: single
  prompts_per_step: 4
  num_generations_answer: 2
  answer: {max_new_tokens: 16, spans: [answer]}
  max_prompt_tokens: {limit: 60}
rewards:
  turn:
    accuracy: {plugin: exact_match, turn: answer}
    unhurried: {plugin: unhurried, turn: answer, seconds: 0.02}
phases: [{name: all, steps: 12}]
evaluation: {problems: 10}
runner: {checkpoint: {every: 6}}
tracking: {mlflow: null}
"""


@pytest.fixture(scope="module")
def english(own_home):
    lines = [
        {"question": f"What is {i} plus one?{' Why?' * 50 * (i % 5 == 0)}", "answer": str(i + 1)}
        for i in range(60)
    ]
    worked = [
        {"question": f"Add one to {i}.", "worked": f"<answer>{i + 1}</answer>"} for i in range(30)
    ]
    (own_home.folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (own_home.folder / "worked.jsonl").write_text("\n".join(map(json.dumps, worked)))
    path = own_home.folder / "english.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture(scope="module")
def unbroken(own_home, english):
    return own_home.submit(yaml=english)


def test_the_tokenizer_is_trained_and_long_prompts_are_counted(own_home, unbroken):
    folder = Path(own_home.run(unbroken).directory)
    trained = Vocabulary.load_folder(folder / "tokenizer")
    assert len(trained.encode("What is 7 plus one?")) <= 8
    metrics = own_home.metrics(unbroken)
    dropped = [value for _, value in metrics["prompts/dropped"]]
    assert len(dropped) == 12 and sum(dropped) > 0
    exported = Vocabulary.load_folder(folder / "model")
    assert exported.encode("What is 7 plus one?") == trained.encode("What is 7 plus one?")


def test_the_loss_of_the_warm_start_is_a_curve(own_home, unbroken):
    (folder,) = (own_home.path / "cache" / "warm_start").iterdir()
    losses = json.loads((folder / "losses.json").read_text())
    curve = own_home.metrics(unbroken)["warm_start/loss"]
    assert curve == list(enumerate(losses, start=1))
    assert len(curve) == 5 and curve[-1][1] < curve[0][1]


def test_a_stopped_run_goes_on_with_the_same_problems(own_home, english, unbroken):
    run_id = own_home.submit("-d", "--again", yaml=english)
    own_home.stop(run_id, after=3)
    assert own_home.rlx("resume", run_id, "-q").returncode == 0
    assert own_home.differences(unbroken, run_id) == []


def test_a_fork_has_the_tokenizer_of_its_checkpoint(own_home, english, unbroken):
    done = own_home.rlx(
        *("submit", english, "-q", "--from-checkpoint", f"{unbroken}@latest"),
        sets={"phases.0.steps": 13, "task.prompt": "'Please: {question}'"},
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        Path(own_home.run(run).directory) / "tokenizer" / "tokenizer.json"
        for run in (done.stdout.strip(), unbroken)
    )
    assert ours.read_bytes() == theirs.read_bytes()
