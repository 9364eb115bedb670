"""The decoders beside the models that they stand for, and the choice between them."""

import copy
from dataclasses import replace

import pytest
import torch
from checkpoints import build_model
from rows import each_row

from rlx.errors import SpecError
from rlx.model import build_policy
from rlx.rollout import CompletionRequest
from rlx.sampler import TransformersSampler
from rlx.sampler.decoders import choose_decoder
from rlx.spec import TinyModelSpec, TurnSpec

CPU = torch.device("cpu")
TINY = TinyModelSpec(
    hidden_size=64, heads=2, kv_heads=1, layers=2, intermediate_size=64, initializer_range=0.15
)
PLAIN = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None, "head_dim": 24},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "smollm3": {"no_rope_layer_interval": 2},
}
OTHERS = {
    "gemma2": "in its layer",
    "granite": "logits that differ from those of the plain decoder",
    "mixtral": "in its",
    "phi3": "in its layer",
}
KINDS = ["sliding_attention", "full_attention"]
WINDOWED = {
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": KINDS},
    "olmo3": {"sliding_window": 8, "layer_types": KINDS},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Layers that see eight tokens; the last has attention sinks too."""
IDS = list(range(5, 45))


def build(kind, **options):
    sizes = {"head_dim": 12, "max_position_embeddings": 128, "initializer_range": 0.15}
    model = build_model(kind, **{**sizes, **options})
    for name, parameter in model.named_parameters() if kind in PLAIN else ():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1, 0.2)
    return model


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def decode(decoder):
    """Logits of calls on forked, chosen, joined and shortened rows, and their places in `IDS`."""
    with torch.inference_mode():
        rows = decoder.start(2)
        found = [rows.prefill([IDS[:9], IDS[:5]], 0)]
        rows = rows.fork([0, 1, 0], 1)
        for step in range(3):
            found.append(rows.step(torch.tensor([IDS[9 + step], IDS[5 + step], 7])))
        rows = rows.select([0, 1], 0).fork([1, 0, 1], 2)
        found.append(rows.prefill([IDS[8:12], IDS[12:30], IDS[8:10]], 1))
        found.append(rows.step(torch.tensor([IDS[12], IDS[30], IDS[11]])))
        aside = rows.set_aside([1, 0, 2], [1, 0, 2])
        rows = type(aside).join_rows([(aside, 0), (aside, 2), (aside, 1)], 20)
        found.append(rows.prefill([IDS[30:32], IDS[9:20], IDS[13:15]], 1))
    at = [(0, 0, 8), (0, 1, 4), (1, 0, 9), (3, 0, 11), (3, 1, 7)]
    at += [(4, 0, 11), (4, 1, 29), (4, 2, 9), (5, 0, 12), (5, 1, 30)]
    at += [(6, 0, 31), (6, 1, 19), (6, 2, 14)]
    return torch.stack([found[call][row] for call, row, _ in at]), [place for *_, place in at]


@each_row("name", PLAIN)
def test_a_plain_model_s_logits_at_every_turn(name):
    model = build(name, **PLAIN[name])
    expected = logits(model, IDS)
    decoder = choose_decoder(model)()
    assert decoder.description == "compact decoder, shared ancestors"
    found, places = decode(decoder)
    torch.testing.assert_close(found, expected[places], atol=2e-5, rtol=2e-5)
    rounded = choose_decoder(model.to(torch.bfloat16))()
    assert rounded.description == decoder.description


@each_row(("name", "why"), OTHERS.items())
def test_a_model_that_is_not_plain_is_called_as_it_is(name, why):
    options = {"embedding_multiplier": 12.0} if name == "granite" else {}
    described = choose_decoder(build(name, **options))().description
    assert described.startswith("the model's own forward pass: it has ") and why in described


@each_row("kind", WINDOWED)
def test_windows_are_kept_at_every_turn(kind):
    model = build(kind, **WINDOWED[kind])
    decoder = choose_decoder(model)()
    assert decoder.description.startswith("the model's own forward pass: it has ")
    found, places = decode(decoder)
    torch.testing.assert_close(found, logits(model, IDS)[places], atol=2e-5, rtol=2e-5)
    whole = logits(build(kind, **{**WINDOWED[kind], "sliding_window": 999}), IDS)
    assert (found - whole[places]).abs().max() > 1e-3, "the window shows"


@each_row(
    ("kind", "options", "why"),
    [
        ("mamba", {"state_size": 4}, "without a cache, for it has parts that its own forward pass"),
        (
            "gpt_neo",
            {"attention_types": [[["local"], 2]], "window_size": 8},
            "its attention windows cannot be tried",
        ),
    ],
)
def test_a_model_that_no_cache_fits_is_read_again_for_every_token(kind, options, why):
    model = build(kind, **options)
    decoder = choose_decoder(model)()
    prefix = "the model's own forward pass over the whole dialogue: "
    assert decoder.description.startswith(prefix + why)
    found, places = decode(decoder)
    torch.testing.assert_close(found, logits(model, IDS)[places], atol=2e-5, rtol=2e-5)


@each_row("kind", ["bert", "roberta"])
def test_a_model_that_sees_later_tokens_is_refused(kind):
    with pytest.raises(SpecError, match=rf"kind '{kind}' cannot be sampled from: it has logits"):
        choose_decoder(build(kind, is_decoder=False))


def test_weights_are_held_once_and_mean_the_same():
    model = build("qwen2", tie_word_embeddings=True)
    expected = logits(model, IDS)
    choose_decoder(model)
    parts = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    held = sum(storage.nbytes() for storage in parts.values())
    assert held == sum(p.nbytes for p in model.parameters())
    torch.testing.assert_close(logits(model, IDS), expected)
    loaded = build("qwen2", tie_word_embeddings=True)
    for parameter in loaded.parameters():
        parameter.data.zero_()
    loaded.load_state_dict(model.state_dict())
    for again in (copy.deepcopy(model), loaded):
        torch.testing.assert_close(logits(again, IDS), expected)


def sample_greedily(sampler):
    with sampler.session() as session:
        (said,) = session.generate([CompletionRequest(tuple(IDS), None, (1,))], TurnSpec(top_k=1))
    return said


def test_whoever_replaces_weights_they_are_those_sampled_from():
    own, source = (replace(build_policy(TINY, seed), end_ids=()) for seed in (1, 2))
    first, second = (TransformersSampler(own, max_rows=4, device=CPU) for _ in range(2))
    before, originals = sample_greedily(first), copy.deepcopy(own.model).parameters()
    second.load(dict(source.model.named_parameters()))
    after = sample_greedily(first)
    expected = sample_greedily(TransformersSampler(source, max_rows=4, device=CPU))
    assert after == sample_greedily(second) == expected
    for parameter, original in zip(own.model.parameters(), originals, strict=True):
        parameter.data = original.data
    assert sample_greedily(first) == before != after


def test_inference_mode_around_a_sampler_leaves_weights_trainable():
    policy = build_policy(TINY, 0)
    with torch.inference_mode():
        TransformersSampler(policy, max_rows=4, device=CPU)
    policy.model(input_ids=torch.tensor([IDS])).logits.sum().backward()
    assert all(p.grad is not None and not p.is_inference() for p in policy.model.parameters())
