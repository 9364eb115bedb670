"""What a plan says is what the engine computes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlx.discovery import resolve_plugins
from rlx.errors import PluginError
from rlx.phase_setup import build_setup
from rlx.plan import check_file
from rlx.plan.memory import estimate_step_memory, token_budget
from rlx.plan.rehearsal_checks import build_stop_fault, check_trial
from rlx.plan.trial import load_plan_problems, load_speech, run_trial
from rlx.reward import RewardPool
from rlx.step import estimate_credit

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"


@pytest.fixture(scope="module")
def trial():
    """The last phase of an experiment, carried through the engine apart from any plan."""
    read, _ = check_file(RLCR)
    parts = build_setup(read.spec.resolve_phase_spec(read.spec.phases[-1]))
    with RewardPool(workers=1, memory_mb=1024) as pool:
        problems = load_plan_problems(parts.spec, parts.task, 3)
        return run_trial(
            parts, problems, load_speech(parts.spec, resolve_plugins(parts.spec)), pool
        )


def test_numbers_are_those_of_assign_credit(plan, trial):
    said = json.loads(json.dumps(plan("rlcr").to_json(), allow_nan=False))
    rows, train = said["phases"][-1]["rows"], trial.train
    assert len(rows) == len(train.batch.rows)
    for b, row in enumerate(rows):
        own = train.batch.is_own[b]
        for key, tensor in (
            ("advantage", train.advantages),
            ("weight", train.weights),
            ("reward", train.token_rewards),
            ("old_logprob", train.streams.old_logprobs),
            ("learns", train.mask),
            ("token", train.batch.token_ids),
        ):
            assert [token[key] for token in row["tokens"]] == tensor[b][own].tolist()
        assert row["score"] == pytest.approx(float(train.scores.total_score[b]))


def test_parts_of_a_reward_add_up_to_what_was_placed(plan):
    report = plan("rlcr", "credit.placement=turn_proportional", "credit.turn_reduce=mean")
    rows = report.phases[-1].rows
    assert {name for row in rows for t in row.tokens for name in t.placed} == {
        *("accuracy", "format", "arithmetic", "brier")
    }
    for row in rows:
        for token in row.tokens:
            assert sum(token.placed.values()) == pytest.approx(token.reward, abs=1e-6)
        assert sum(t.reward for t in row.tokens) == pytest.approx(row.score, abs=1e-5)


def test_text_of_tokens_is_the_text(plan, trial):
    for row in plan("rlcr").phases[-1].rows:
        tree = trial.trees[row.tree]
        place = trial.train.batch.rows[row.row]
        assert "".join(t.text for t in row.tokens).removesuffix("<eos>") == "".join(
            tree.segments[turn].text for turn in place.turns
        )


def test_shown_are_an_answer_that_scored_one_that_failed_and_their_confidences(plan):
    phase = plan("rlcr").phases[-1]
    by_number = {row.row: row for row in phase.rows}
    answers = [by_number[n] for n in phase.shown if by_number[n].kind == "answer"]
    correct = [next(g.raw for g in row.rewards if g.name == "accuracy") for row in answers]
    assert correct == [1.0, 0.0]
    below = [by_number[n].parent for n in phase.shown if by_number[n].kind == "confidence"]
    assert below == [answers[0].row] * 2 + [answers[1].row] * 2


def test_phases_that_are_alike_are_shown_once(plan):
    phases = "[{name: a, steps: 3}, {name: b, steps: 4, set: {optimizer.learning_rate: 1e-5}}]"
    (phase,) = plan("countdown", f"phases={phases}").phases
    assert (phase.names, phase.steps) == (("a", "b"), 7)
    assert [phase.names for phase in plan("rlcr").phases] == [("answers",), ("joint",)]


def test_the_same_seed_plans_the_same(plan):
    first = plan("countdown").to_json()
    assert plan.__wrapped__("countdown").to_json() == first
    other = plan("countdown", "seed=1").to_json()
    assert other["phases"][0]["rows"] != first["phases"][0]["rows"]


def test_streams_are_made_up_only_where_something_asks(plan):
    (plain,) = plan("countdown").phases
    assert plain.made_up == ("responses", "behaviour log-probabilities")
    assert all(t.kl is None and t.value is None for row in plain.rows for t in row.tokens)
    (asked,) = plan(
        "countdown", "estimator={name: gae}", "critic={}", "credit.use_kl_in_reward=true"
    ).phases
    assert asked.made_up[2:] == ("log-probability, reference", "value")
    token = asked.rows[0].tokens[0]
    assert token.reward == pytest.approx(-0.001 * token.kl)
    assert token.value is not None and token.target is not None


def test_credit_that_no_update_could_use_is_found(trial):
    train = trial.train

    def find(**changes):
        return [(f.severity, f.path, f.kind) for f in check_trial(replace(trial, **changes))]

    assert find() == []
    for wrong in (train.advantages * torch.nan, train.advantages + ~train.mask):
        with pytest.raises(PluginError) as caught:
            estimate_credit(lambda _, wrong=wrong: wrong, train.placed)
        fault = build_stop_fault(caught.value)
        assert (fault.severity, fault.path, fault.kind) == ("error", ("estimator",), "plugin")
    lost = replace(train.placed, lost=train.placed.lost + 1)
    lossy = find(train=replace(train, placed=lost))
    assert lossy == [("warning", ("credit", "on_missing_turn"), "conflict")]
    assert find(train=None, stopped="turn 1 has no token") == [
        ("error", ("credit", "on_missing_turn"), "conflict")
    ]
    assert find(rewards=None, stopped="nothing") == [("error", ("rewards",), "conflict")]


def test_a_step_that_needs_more_memory_than_is_free_is_a_warning(trial, monkeypatch):
    spec = trial.setup.spec
    tokens = token_budget(trial.setup, trial.trees)  # a device is named: `auto` may find a GPU
    needed = estimate_step_memory(trial.setup, trial.shape, tokens).total

    def find(free, device="cpu", **runner):
        runner["device"] = device
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
        changed = spec.model_copy(update={"runner": spec.runner.model_copy(update=runner)})
        setup = replace(trial.setup, spec=changed)
        return [(f.severity, f.path) for f in check_trial(replace(trial, setup=setup))]

    assert find(needed) == find(needed - 1, device="cuda") == []
    assert find(needed - 1) == [("warning", ("runner", "micro_batch_tokens"))]
    assert find(needed, ranks=2) != []


def test_a_gguf_file_that_is_here_is_no_missing_tokenizer(plan, tmp_path):
    for name, told in (("here.gguf", "rlx plan --try"), ("none", "not on this machine")):
        (tmp_path / "here.gguf").write_bytes(b"GGUF")
        notes = plan("countdown", f"model={{kind: pretrained, path: {tmp_path / name}}}").notes
        assert sum(told in note for note in notes) == 1
