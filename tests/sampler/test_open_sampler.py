"""What every engine promises when it is opened."""

from contextlib import nullcontext

import pytest
import torch
from rows import each_row

from rlx.errors import EnvironmentFault, PluginError
from rlx.model import build_policy
from rlx.rollout import CompletionRequest
from rlx.sampler import (
    engine,
    open_sampler,
    require_engine,
)
from rlx.spec import RunnerSpec, TinyModelSpec, TransformersSamplerSpec, TurnSpec, VllmSamplerSpec

CPU = torch.device("cpu")


def test_an_engine_that_is_not_installed_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match="vLLM is not installed: pip install 'rlx"):
        require_engine(VllmSamplerSpec(engine="vllm"))
    require_engine(TransformersSamplerSpec())


@each_row("dtype", ["float32", "bfloat16"])
def test_the_policy_stays_as_it_is(dtype):
    policy = build_policy(TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1), 0)
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    asked = [CompletionRequest(policy.dialogue.open("nums: 1 2\ntarget: 3\n"), None, (1,))]
    with open_sampler(policy, TransformersSamplerSpec(), RunnerSpec(dtype=dtype), CPU) as sampler:

        def said():
            with sampler.session() as session:
                return session.generate(asked, TurnSpec(max_new_tokens=8))

        first = said()
        sampler.load({name: torch.zeros_like(weight) for name, weight in before.items()})
        assert said() != first
    for name, weight in policy.model.named_parameters():
        assert torch.equal(weight, before[name]), name


def test_an_engine_that_does_not_derive_from_the_base_class_is_refused(monkeypatch):
    monkeypatch.setattr(engine, "import_implementation", lambda _: lambda *_: nullcontext(object()))
    refused = pytest.raises(PluginError, match=r"does not derive from rlx\.sampler\.SamplingEngine")
    with refused, open_sampler(None, TransformersSamplerSpec(), RunnerSpec(), CPU):
        pass
