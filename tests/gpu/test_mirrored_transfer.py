"""Weights on their way from a learner on a mirrored GPU to a vLLM worker, by every way.

What is published must leave the host or the device in one known line; see `mirrored_vllm.py`.
"""

import inspect
import re
from collections import Counter

import pytest
import torch
from mirrored_gpu import CUDA, mirror_gpu, mutate
from mirrored_vllm import mirror_vllm

from rlx.errors import RlxError
from rlx.model import build_policy
from rlx.rollout import CompletionRequest
from rlx.sampler import VllmSampler, transfer, vllm_engine
from rlx.spec import RunnerSpec, TinyModelSpec, TurnSpec, VllmSamplerSpec

MODEL = TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=32)
WAYS = {"file": True, "ipc": True, "nccl": False}
"""Whether the worker shares the rank's GPU."""
TURN = TurnSpec(max_new_tokens=4)
REQUESTS = [CompletionRequest((5, 6, 7), None, (0, 1))]
PUBLISHING = r"rlx/(sampler/(transfer|vllm_engine|vllm_process)|model/).*"


SOURCE, FIRST = inspect.getsourcelines(transfer.collect_weights)
COLLECTING = range(FIRST, FIRST + len(SOURCE))


@pytest.fixture
def gpu():
    with mirror_gpu() as gpu, mirror_vllm():
        yield gpu


def publish(way, gpu):
    """Sends the weights of a model on the device twice; returns the waits and copies of the second
    time, by line, and what the worker samples with them."""
    policy = build_policy(MODEL, 0)
    spec = VllmSamplerSpec(weight_transfer=way, colocate=WAYS[way], max_length=64)
    sampler = VllmSampler(policy, spec, RunnerSpec(device="cuda"), CUDA)
    try:
        policy.model.to(CUDA)
        weights = dict(policy.model.named_parameters())
        with torch.no_grad():
            for weight in weights.values():
                weight.mul_(1.5)
        gpu.reset()
        sampler.load(weights)
        lines = {
            kind: Counter({line: n for line, n in counts.items() if re.match(PUBLISHING, line)})
            for kind, counts in (("waits", gpu.waits), ("copies", gpu.copies))
        }
        sampler.release()
        with sampler.session() as session:
            (group,) = session.generate(REQUESTS, TURN)
    finally:
        sampler.close()
    return lines, [(one.token_ids, one.logprobs) for one in group], len(weights)


@pytest.mark.parametrize("way", WAYS)
def test_weights_arrive_without_a_detour(way, gpu):
    lines, sampled, count = publish(way, gpu)
    assert not lines["copies"], "nothing goes back to the device"
    if way == "file":
        ((line, waits),) = lines["waits"].items()
        file, number, what = re.split("[: ]", line, maxsplit=2)
        assert (file, what) == ("rlx/sampler/transfer.py", "cpu")
        assert int(number) in COLLECTING, "a whole copy stays on the device until it is written"
        assert waits == count, "each weight goes to the host once"
    else:
        assert not lines["waits"], "nothing leaves the device"
    assert sampled == publish("file", gpu)[1]


MUTANTS = [
    ("nccl", 'if way == "file" else device', "", "Tensors must be CUDA"),
    ("ipc", 'if way == "file" else device', "", "weights took a detour"),
    ("nccl", "weight.detach().to(place", "weight.detach().cpu().to(place", "nothing"),
    ("ipc", "weight.detach().to(place", "weight.detach().cpu().to(place", "nothing"),
    ("file", "(place, dtype, copy=True)", "(device, dtype, copy=True)", "whole copy"),
]


@pytest.mark.parametrize(("way", "old", "new", "found"), MUTANTS, ids=lambda v: str(v)[:12])
def test_a_detour_is_found(way, old, new, found, gpu, monkeypatch):
    mutant = mutate(transfer, "collect_weights", old, new)
    monkeypatch.setattr(vllm_engine, "collect_weights", mutant)
    with pytest.raises((AssertionError, RlxError, ValueError), match=found):
        test_weights_arrive_without_a_detour(way, gpu)
