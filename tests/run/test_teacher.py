"""Runs that learn from another model: what they compute, record and repeat."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlx.model import build_policy
from rlx.spec import TinyModelSpec

SPEC = """
name: taught
model:
  kind: tiny
  hidden_size: 32
  heads: 1
  kv_heads: 1
  layers: 1
  intermediate_size: 32
  warm_start: {steps: 100, warmup_steps: 10, learning_rate: 1e-2}
  reference: {path: teacher}
task:
  plugin: countdown
  numbers: {2: 0.7, 3: 0.3}
  number_range: [1, 20]
  target_range: [1, 99]
  operators: "+-*"
rollout:
  schedule: single
  prompts_per_step: 3
  num_generations_answer: 1
  answer: {max_new_tokens: 44, spans: [think, answer]}
loss: {kl: {coefficient: 1}}
optimizer: {learning_rate: 1e-3, mini_batches: 2}
runner: {checkpoint: {every: 2}}
phases: [{name: taught, steps: 4}]
"""
BY_TIME = ("perf/", "record/")


@pytest.fixture(scope="module")
def taught(own_home):
    """A home with a teacher, and a finished run without any reward."""
    shape = TinyModelSpec(
        tokenizer="arithmetic", hidden_size=64, layers=2, heads=2, initializer_range=0.2
    )
    build_policy(shape, seed=7).save(own_home.folder / "teacher")
    (own_home.folder / "taught.yaml").write_text(SPEC)
    return own_home, own_home.submit("taught.yaml")


def curves(home, run):
    found = home.metrics(run.id)
    return {name: dict(values) for name, values in found.items() if not name.startswith(BY_TIME)}


def test_the_stored_log_probabilities_are_the_teachers(taught):
    home, run = taught
    assert run.status == "finished", run.reason
    teacher = AutoModelForCausalLM.from_pretrained(home.folder / "teacher")
    checked = 0
    for _, trees, _ in home.bodies(run):
        for tree in trees:
            for row in tree["rows"]:
                read, wrote = tree["segments"][0], tree["segments"][row["segment"]]
                ids = torch.tensor([[*read["token_ids"], *wrote["token_ids"]]])
                with torch.no_grad():
                    logprobs = teacher(ids).logits[0, :-1].log_softmax(-1)
                theirs = logprobs.gather(1, ids[0, 1:, None])[:, 0]
                stored = torch.tensor(row["reference_logprobs"])[-len(wrote["token_ids"]) :]
                learns = torch.tensor(row["mask"])[-len(stored) :]
                expected = theirs[-len(stored) :]
                torch.testing.assert_close(stored[learns], expected[learns], atol=1e-4, rtol=0)
                checked += int(learns.sum())
    assert checked > 100


def test_each_step_learns_although_nothing_is_rewarded(taught):
    home, run = taught
    found = curves(home, run)
    assert set(found["train/kl_loss"]) == set(found["kl/reference"]) == {1, 2, 3, 4}
    assert all(value > 0 for value in found["train/grad_norm"].values())
    moved = [value for value in found["train/ratio_max"].values() if value > 1.001]
    assert moved, "the second mini-batch of a step sees a moved policy"
    assert set(found["score/total_score"].values()) == {0.0}
    assert not [name for name in found if name.startswith("rewards/")]
    with home.registry() as registry:
        assert registry.results.evaluations(run.id) == [], "nothing says what is right"
        warnings = [e for e in registry.results.events(run.id) if e.level != "info"]
    assert [event.message for event in warnings] == []


def test_it_is_shown_checked_and_rescored_to_the_bit(taught):
    home, run = taught
    for command in ("status", "logs", "samples"):
        done = home.rlx(command, run.id)
        assert done.returncode == 0, done.stderr
    home.check_record(run.id)


def test_a_run_from_its_checkpoint_takes_the_same_steps(taught):
    home, run = taught
    fork = home.submit("taught.yaml", {"from_checkpoint": f"{run.id}@2"})
    whole, rest = curves(home, run), curves(home, fork)
    assert rest["train/kl_loss"].keys() == {3, 4}
    for name, values in rest.items():
        assert values == {step: whole[name][step] for step in values}, name


def test_an_edited_teacher_makes_another_run(taught):
    home, run = taught
    same = home.rlx(
        "submit",
        "taught.yaml",
        "--quiet",
        "--set=tracking.mlflow=null",
    )
    assert same.stdout.strip() == run.id, same.stderr
    build_policy(
        TinyModelSpec(tokenizer="arithmetic", hidden_size=64, layers=2, heads=2), seed=8
    ).save(home.folder / "teacher")
    resumed = home.rlx("check", run.id)
    assert "model 'teacher': contents was" in resumed.stdout + resumed.stderr
    other = home.submit("taught.yaml", {"phases.0.steps": 1})
    assert other.id != run.id
