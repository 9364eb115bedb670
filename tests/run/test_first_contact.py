"""What a pretrained model answers before it is trained decides whether the run begins."""

import pytest
import torch
import yaml
from checkpoints import make_checkpoint
from run_homes import QUIET

from rlx.results import models
from rlx.run.loop import MOST_CONTACT_PROMPTS

SPEC = {
    "name": "contact",
    "seed": 0,
    "task": {
        "plugin": "countdown",
        "numbers": [2],
        "number_range": [1, 9],
        "target_range": [1, 20],
    },
    "rollout": {
        "schedule": "single",
        "prompts_per_step": 4,
        "num_generations_answer": 4,
        "answer": {"max_new_tokens": 44, "spans": ["think", "answer"], "stop": ["</answer>"]},
    },
    "rewards": {"turn": {"accuracy": {"plugin": "countdown.verify", "turn": "answer"}}},
    "mask": {"strategy": "turn_spans"},
    "estimator": {"name": "grpo"},
    "evaluation": {"problems": 4},
    "phases": [{"name": "only", "steps": 1}],
}


@pytest.fixture(scope="module")
def beginner(tmp_path_factory):
    """A model of random weights, which knows nothing of tags."""
    folder = tmp_path_factory.mktemp("beginner")
    make_checkpoint(folder, "llama", "chatml")
    return folder


@pytest.fixture
def submit(own_home, tmp_path):
    def submit(*arguments, model):
        spec = {**SPEC, "model": {"kind": "pretrained", "path": str(model)}}
        path = tmp_path / "contact.yaml"
        path.write_text(yaml.safe_dump(spec))
        done = own_home.rlx("submit", path, "--again", "-q", *arguments, sets=QUIET)
        run = own_home.run(own_home.json("runs")[0]["run"])
        events = {event.kind: event for event in own_home.events(run.id)}
        return done, run, events

    return submit


def test_a_model_whose_answers_all_score_alike_is_not_trained(submit, beginner):
    done, run, events = submit(model=beginner)
    assert done.returncode != 0
    assert (run.status, run.step) == ("failed", 0)
    assert "carry no signal" in run.reason
    assert f"0 of {MOST_CONTACT_PROMPTS} answer groups have a signal" in run.reason
    assert "rlx submit --anyway" in run.reason
    contact = events["first_contact"]
    assert (contact.level, contact.payload["has_signal"]) == ("warning", False)


def test_anyway_trains_it_all_the_same(submit, beginner):
    done, run, events = submit("--anyway", model=beginner)
    assert done.returncode == 0, done.stderr
    assert (run.status, run.step) == ("finished", 1)
    assert events["first_contact"].payload["groups"]["answer"]["with_signal"] == 0


def test_a_plan_tries_the_model_and_times_a_step_of_each_phase(
    own_home, finished, tmp_path, monkeypatch
):
    more = {"rollout.prompts_per_step": 8, "loss.old_logprobs": "learner"}
    phases = [{"name": "one", "steps": 3}, {"name": "two", "steps": 2, "set": more}]
    model = {"kind": "pretrained", "path": str(finished.root / "model")}
    path = tmp_path / "contact.yaml"
    path.write_text(yaml.safe_dump({**SPEC, "model": model, "phases": phases}))
    tried = own_home.json("plan", path, "--try", 2)
    assert tried["first_contact"]["prompts"] == 2
    one, two = tried["seconds"]
    assert [(each["phase"], each["steps"]) for each in (one, two)] == [("one", 3), ("two", 2)]
    for each in (one, two):
        parts = [each["sampling"], each["scoring"], each["update"]]
        assert min(parts) > 0
        assert each["step"] == pytest.approx(sum(parts))
    lines = own_home.rlx("plan", path, "--try", 2).stdout
    assert "a step of two takes about" in lines

    def fill_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(models, "_time_updates", fill_memory)
    lines = own_home.rlx("plan", path, "--try", 2).stdout
    assert "first contact: 2 problems" in lines
    assert "its update does not fit beside the sampler on one GPU" in lines
