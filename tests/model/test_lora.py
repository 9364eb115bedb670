"""Adapters: where they go, what they start as, and what becomes of them.

What they learn is measured in `tests/learner`, on several ranks.
"""

import pytest
import torch
from checkpoints import build_model
from rows import each_row

from rlx.errors import SpecError
from rlx.model.lora import (
    adapt_model,
    adapter_weights,
    disable_adapters,
    is_adapted,
    iterate_merged_weights,
)
from rlx.spec import Lora

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
EVERYWHERE = sorted([*ATTENTION, "down_proj", "gate_proj", "up_proj"])


def model_of(kind):
    """The output embedding of a llama is its own; gpt2's linear layers keep their weights the other
    way round."""
    return build_model(kind, num_hidden_layers=1, tie_word_embeddings=kind != "llama")


def get_merged_weights(model):
    return dict(iterate_merged_weights(model))


MODELS = pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])


def fill(model):
    generator = torch.Generator().manual_seed(0)
    for weight in adapter_weights(model).values():
        weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=torch.arange(4, 20)[None]).logits


def copies(weights):
    return {name: weight.detach().clone() for name, weight in weights.items()}


def where(model):
    """Last names of the adapted layers."""
    return sorted({name.split(".")[-3] for name in adapter_weights(model)})


@MODELS
def test_an_adapted_model_begins_as_it_was_and_learns_in_its_adapters_alone(kind):
    model = model_of(kind)
    before, said = copies(dict(model.named_parameters())), logits(model)
    adapt_model(model, Lora(rank=2), 0)
    assert torch.equal(logits(model), said)
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert learned == sum(w.numel() for w in adapter_weights(model).values()) > 0
    merged = get_merged_weights(model)
    assert list(merged) == list(before)
    assert all(torch.equal(merged[name], before[name]) for name in before)


@MODELS
def test_a_merged_model_says_what_the_adapted_one_says(kind):
    model, plain = model_of(kind), model_of(kind)
    adapt_model(model, Lora(rank=2, alpha=3), 0)
    fill(model)
    plain.load_state_dict(get_merged_weights(model), strict=False)
    said = logits(model)
    assert (logits(plain) - said).abs().max() <= 1e-5
    for weight in adapter_weights(model).values():
        weight.zero_()
    assert (logits(model) - said).abs().max() > 1e-3


@MODELS
def test_without_its_adapters_a_model_says_what_it_said_before(kind):
    model = model_of(kind)
    plain = logits(model)
    assert not is_adapted(model)
    adapt_model(model, Lora(rank=2), 0)
    assert is_adapted(model)
    fill(model)
    said = logits(model)
    learned = [name for name, p in model.named_parameters() if p.requires_grad]
    with pytest.raises(KeyboardInterrupt), disable_adapters(model):
        assert torch.equal(logits(model), plain)
        raise KeyboardInterrupt
    assert torch.equal(logits(model), said)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == learned


@each_row(
    ("kind", "targets", "expected"),
    [
        ("qwen3", ["all-linear"], EVERYWHERE),
        ("llama", ["all-linear"], EVERYWHERE),
        ("gpt2", ["all-linear"], ["c_attn", "c_fc", "c_proj"]),
        ("qwen3", ["q_proj", "mlp.up_proj"], ["q_proj", "up_proj"]),
        ("llama", ["q_proj", "lm_head"], ["lm_head", "q_proj"]),
        ("llama", ["all-linear", "lm_head"], sorted([*EVERYWHERE, "lm_head"])),
    ],
)
def test_adapters_go_where_they_are_asked_to(kind, targets, expected):
    model = model_of(kind)
    adapt_model(model, Lora(targets=targets), 0)
    assert where(model) == expected


@each_row(
    ("target", "complaint"),
    [
        (
            "q_porj",
            r"model\.lora\.targets: .* 'q_porj' that can take an adapter "
            r"\(did you mean 'q_proj'\?\); available: down_",
        ),
        ("proj", r"named 'proj'.*; available: down_proj, .*, v_proj, and all-linear"),
        ("lm_head", "no linear layer named 'lm_head' that can take an adapter"),
        ("\x1b[31m", r"'\\x1b\[31m'"),
    ],
)
def test_a_target_that_this_model_does_not_have_is_refused(target, complaint):
    with pytest.raises(SpecError, match=complaint):
        adapt_model(model_of("qwen3"), Lora(targets=["v_proj", target]), 0)


def test_the_seed_decides_how_adapters_begin():
    begun = []
    for global_seed, seed in ((1, 3), (2, 3), (1, 4)):
        model = model_of("qwen3")
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        adapt_model(model, Lora(rank=2), seed)
        assert torch.equal(torch.get_rng_state(), state)
        begun.append(adapter_weights(model))
    one, again, other = begun
    assert all(torch.equal(one[name], again[name]) for name in one)
    differing = {name for name in one if not torch.equal(one[name], other[name])}
    assert differing == {name for name in one if "lora_A" in name}


def test_bfloat16_is_rounded_once():
    model = model_of("qwen3")
    adapt_model(model, Lora(rank=2), 0)
    fill(model)
    exact = get_merged_weights(model.bfloat16().float())
    found = get_merged_weights(model.bfloat16())
    assert all(torch.equal(found[name], exact[name].bfloat16()) for name in exact)
