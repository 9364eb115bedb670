"""Copies of models: where their weights are, what stays tied, and which layers are kept."""

import torch
from checkpoints import build_model
from rows import each_row

from rlx.model import copy_model, keep_first_layers, share_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "all alike": ("qwen2", {}, 2),
    "windows in every second": ("gemma2", {"head_dim": 16}, 2),
    "a whole one after three windows": (
        "olmo3",
        {"layer_types": [*["sliding_attention"] * 3, "full_attention"] + ["sliding_attention"] * 2},
        4,
    ),
    "no experts in the fifth": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [4]}, 5),
    "kinds by a name of their own": (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 3]]},
        2,
    ),
}
"""A model, and how many of its six layers are needed to have one of every kind."""


def model_of(kind, **options):
    return build_model(kind, num_hidden_layers=6, **options)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 23)[None]).logits


def test_a_copy_has_weights_of_its_own_and_the_buffers_precision():
    model = model_of("qwen2", tie_word_embeddings=True)
    model.model.norm.requires_grad_(False)
    copied = copy_model(model, torch.device("cpu"), torch.bfloat16)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert not copied.model.norm.weight.requires_grad
    assert copied.lm_head.weight.requires_grad
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copied.buffers()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    own = {p.data_ptr() for p in copy_model(model).parameters()}
    assert own.isdisjoint(p.data_ptr() for p in model.parameters())
    assert torch.equal(logits(copy_model(model)), logits(model))


def test_a_second_module_has_the_same_weights_until_it_gets_others():
    model = model_of("qwen2", tie_word_embeddings=True)
    second = share_model(model).requires_grad_(False)
    assert second.lm_head.weight is second.model.embed_tokens.weight
    pairs = list(zip(model.parameters(), second.parameters(), strict=True))
    assert all(a.data_ptr() == b.data_ptr() and a is not b for a, b in pairs)
    assert all(a.requires_grad for a in model.parameters())
    before = logits(model)
    for parameter in second.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert torch.equal(logits(model), before)


@each_row("case", KINDS)
def test_one_layer_of_every_kind_is_kept(case):
    kind, options, needed = KINDS[case]
    model = model_of(kind, **options)
    before = logits(model)
    with keep_first_layers(model):
        few = copy_model(model)
    stacks = [m for m in few.get_decoder().children() if isinstance(m, torch.nn.ModuleList)]
    assert [len(layers) for layers in stacks] == [needed]
    assert not torch.equal(logits(few), before)
    assert torch.equal(logits(model), before)
