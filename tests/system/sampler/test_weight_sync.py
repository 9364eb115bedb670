"""A sampler that keeps something of former weights is found out."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import needs_vllm
from rows import each_row

from rlx.errors import RlxError
from rlx.model import build_policy
from rlx.rollout import Completion
from rlx.run.weight_sync import compute_sync_figures, synchronize_sampler
from rlx.sampler import SamplingEngine, open_sampler, vllm_engine
from rlx.spec import RunnerSpec, TinyModelSpec, VllmSamplerSpec

TESTS = Path(__file__).parents[2]
CPU = torch.device("cpu")
RUNNER = RunnerSpec()
MODEL = TinyModelSpec(
    hidden_size=64, heads=2, kv_heads=1, layers=2, intermediate_size=64, initializer_range=0.15
)


class Plain:
    """A learner without its engine: the model's own forward."""

    def __init__(self, policy):
        self.model = policy.model

    def iterate_weights(self):
        return self.model.named_parameters()

    @torch.no_grad()
    def logprobs(self, batch, want):
        logits = self.model(batch.token_ids, attention_mask=batch.is_token.long()).logits
        said = logits.log_softmax(dim=-1)[:, :-1].gather(2, batch.token_ids[:, 1:, None])
        return torch.nn.functional.pad(said[..., 0], (1, 0)).where(want, 0.0)

    @torch.no_grad()
    def learn(self):
        generator = torch.Generator().manual_seed(1)
        for weight in self.model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)


def machinery(policy, spec, sampler):
    return SimpleNamespace(
        spec=SimpleNamespace(sampler=spec, runner=RUNNER),
        ranks=SimpleNamespace(gather=lambda one: [one]),
        policy=policy,
        learner=Plain(policy),
        sampler=sampler,
    )


@needs_vllm
@pytest.mark.parametrize("forgets", ["cache", "embeddings"])
def test_what_vllm_keeps_of_former_weights_stops_the_run(monkeypatch, forgets):
    monkeypatch.setenv("RLX_TEST_FORGETS", forgets)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(vllm_engine, "WORKER", "forgetful_vllm_process")
    policy, spec = build_policy(MODEL, 0), VllmSamplerSpec(engine="vllm", kv_cache_mb=32)
    with open_sampler(policy, spec, RUNNER, CPU) as sampler:
        m = machinery(policy, spec, sampler)
        if forgets != "embeddings":  # the very first weights came the same way
            synchronize_sampler(m)
            assert sampler.drift.mean <= sampler.drift.largest <= 5e-5
        m.learner.learn()
        with pytest.raises(RlxError, match="a different policy than the one being trained"):
            synchronize_sampler(m)
        drift = sampler.drift
        assert drift.largest > 0.05
        assert drift.mean > 0.01, "ten times what is tolerated"
        assert 0 < drift.k3 < drift.largest
        assert compute_sync_figures(sampler) == {
            "sampler/drift": drift.largest,
            "sampler/drift_mean": drift.mean,
            "sampler/drift_k3": drift.k3,
            "sampler/restarts": 0.0,
        }


class Bfloat16Noise(SamplingEngine):
    """Says of itself what correct bfloat16 engines say of each other: σ .05, few far off."""

    def __init__(self, scale):
        self.scale = scale
        self.context_length = 256

    @contextmanager
    def session(self):
        yield self

    def load(self, weights):
        pass

    def generate(self, requests, sampling):
        generator = torch.Generator().manual_seed(0)
        scale = self.scale

        def complete():
            noise = (scale * torch.randn(8, generator=generator)).tolist()
            return Completion(tuple(range(5, 13)), tuple(noise), "length")

        return [tuple(complete() for _ in request.seeds) for request in requests]


@each_row("scale, passes", [(0.05, True), (0.4, False)])
def test_bfloat16_is_judged_by_the_mean(scale, passes):
    policy, spec = build_policy(MODEL, 0), VllmSamplerSpec(engine="vllm")
    m = machinery(policy, spec, Bfloat16Noise(scale))
    m.spec.runner = RunnerSpec(dtype="bfloat16")
    m.learner = SimpleNamespace(
        iterate_weights=lambda: iter(()),
        logprobs=lambda batch, want: torch.zeros(batch.token_ids.shape),
    )
    if passes:
        synchronize_sampler(m)
        assert m.sampler.drift.largest > 0.1, "more than the mean may be"
        return
    with pytest.raises(RlxError, match="in the mean"):
        synchronize_sampler(m)
