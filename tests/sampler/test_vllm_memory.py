"""What a rank asks of a vLLM worker that shares its GPU; the worker is a stand-in."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlx.model import build_policy
from rlx.plan import read_spec
from rlx.rollout import CompletionRequest
from rlx.run.weight_sync import synchronize_sampler
from rlx.sampler import VllmSampler, expect_dialogue_length, vllm_engine
from rlx.spec import RunnerSpec, TinyModelSpec, TurnSpec, VllmSamplerSpec

CUDA = torch.device("cuda", 0)
RUNNER = RunnerSpec(device="cuda")
MODEL = TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=32)
TURN = TurnSpec(max_new_tokens=4)
ROW = ([5, 6], [-1.0, -1.0], "length")


class StandIn:
    """Writes down what it is asked; every answer has one row per request."""

    def __init__(self, *_): ...

    def ask(self, message, doing, weights=None):
        if "ask" not in message:
            self.told.append(f"start {message['max_length']}")
            return {"longest": message["max_length"]}
        self.told.append(message["ask"])
        return {"rows": [ROW] * len(message.get("rows", ()))}

    def close(self): ...


@pytest.fixture
def told(monkeypatch):
    StandIn.told = []
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda: None)
    monkeypatch.setattr(vllm_engine, "WorkerProcess", StandIn)
    monkeypatch.setattr(vllm_engine, "WeightFile", lambda *_: SimpleNamespace(close=int))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: StandIn.told.append("empty cache"))
    return StandIn.told


def open_sampler(max_length=128):
    policy = build_policy(MODEL, 0)
    return policy, VllmSampler(policy, VllmSamplerSpec(max_length=max_length), RUNNER, CUDA)


def sample(sampler, context=(1, 2, 3)):
    with sampler.session() as session:
        session.generate([CompletionRequest(context, None, (0,))], TURN)


def test_it_sleeps_and_wakes_once_per_step(told):
    policy, sampler = open_sampler()
    learner = SimpleNamespace(
        iterate_weights=lambda: iter(dict(policy.model.named_parameters()).items()),
        logprobs=lambda batch, want: torch.where(want, -1.0, 0.0),
    )
    context = SimpleNamespace(
        spec=SimpleNamespace(sampler=VllmSamplerSpec(), runner=RUNNER),
        ranks=SimpleNamespace(gather=lambda one: [one]),
        policy=policy,
        learner=learner,
        sampler=sampler,
    )
    told.clear()
    for _ in range(2):
        sample(sampler)
        sample(sampler)  # greedy baselines
        sampler.release()
        synchronize_sampler(context)
    step = ["generate", "generate", "sleep", "empty cache", "load", "generate", "generate"]
    assert told == 2 * step


def test_a_step_without_an_update_finds_its_weights_again(told):
    _, sampler = open_sampler()
    told.clear()
    sampler.release()
    sampler.release()
    sample(sampler)
    assert told == ["sleep", "empty cache", "load", "generate"]


def test_a_longer_dialogue_restarts_the_worker_with_more_room(told):
    policy, sampler = open_sampler()
    assert told == ["empty cache", "start 128", "load"]
    assert sampler.context_length == policy.context_length
    told.clear()
    sample(sampler, tuple(range(126)))
    longer = f"start {min(policy.context_length, 1024)}"
    assert told == ["empty cache", longer, "load", "generate"]


def test_the_length_is_that_of_the_experiments_turns():
    spec = read_spec(Path(__file__).parents[2] / "experiments" / "quick.yaml").spec
    tokens = 44 + 6 + 1024
    assert expect_dialogue_length(spec) == tokens
    assert VllmSamplerSpec().for_length(tokens).max_length == tokens
    assert VllmSamplerSpec(max_length=9).for_length(tokens).max_length == 9
