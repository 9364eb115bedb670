"""What a critic is made of; how it learns is measured with the learner, on several ranks."""

from dataclasses import replace

import pytest
import torch
from checkpoints import build_model

from rlx.errors import SpecError
from rlx.learner import Critic, Ranks, critic_rate
from rlx.learner.critic import _compute_hidden_size, _share_decoder
from rlx.learner.forward import PackedValues, choose_form
from rlx.learner.pack import pack_rows
from rlx.model import build_policy
from rlx.spec import CriticSpec, RunnerSpec, TinyModelSpec

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def policy():
    small = TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=48)
    return build_policy(small, 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("qwen3", "llama", "gpt2", "gpt_neox")),
        # Its last hidden state is narrower than its layers, and it drops out in training.
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    ],
)
def test_a_value_is_what_the_tokens_before_say(policy, kind, options):
    policy = replace(policy, model=build_model(kind, **options).train())
    decoder = _share_decoder(policy)
    values = PackedValues(decoder, _compute_hidden_size(decoder), seed=3)
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 11, 12], [5, 6, 13, 14, 0]])
    want = torch.zeros_like(ids, dtype=torch.bool)
    want[:, 2:] = ids[:, 2:] > 0
    packed = pack_rows(ids, ids > 0, want)
    assert choose_form(values, ALONE).form.merges
    with torch.no_grad():
        found = values(packed)
        for value, row, column in zip(found, packed.rows, packed.columns, strict=True):
            last = decoder(input_ids=ids[row, None, :column]).last_hidden_state[0, -1]
            assert value == pytest.approx(float(last @ values.head.weight), abs=1e-5)
    assert found.abs().max() > 1e-3


def test_a_model_without_a_decoder_of_its_own_is_refused(policy):
    headless = replace(policy, model=policy.model.get_decoder())
    with pytest.raises(SpecError, match="critic: a model of kind 'qwen3' has no separate decoder"):
        Critic(headless, RunnerSpec(), CriticSpec(), ALONE, 0)


def test_the_rate_warms_up_and_stays():
    spec = CriticSpec(learning_rate=2.0, warmup_steps=4)
    assert [critic_rate(spec, step) for step in range(6)] == [0.5, 1, 1.5, 2, 2, 2]
    assert critic_rate(CriticSpec(learning_rate=2.0), 0) == 2
