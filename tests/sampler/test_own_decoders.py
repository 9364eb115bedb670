"""Decoders that call the model itself: with attention windows, and without a cache."""

import pytest
import torch
from rows import each_row
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlx.errors import SpecError
from rlx.sampler.engine import choose_decoder
from rlx.sampler.own_forward import UncachedDecoder

SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
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
    config = CONFIG_MAPPING[kind](**{**SIZES, **options})
    attention = "eager" if kind in ("gpt_oss", "mamba") else "sdpa"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def decode(decoder):
    """Logits of calls on forked, joined and shortened rows, with the place of each in `IDS`."""
    with torch.inference_mode():
        rows = decoder.start(2)
        found = [rows.read([IDS[:12], IDS[:5]], 0)]
        rows = rows.fork([0, 1, 0], 2)
        found.append(rows.step(torch.tensor([IDS[12], IDS[5], 7])))
        aside = rows.set_aside([1, 0], [1, 0])
        rows = type(aside).join_rows([(aside, 0), (aside, 1)], 20)
        found.append(rows.read([IDS[5:25], IDS[13:15]], 1))
    at = [(0, 0, 11), (0, 1, 4), (1, 0, 12), (1, 1, 5), (2, 0, 24), (2, 1, 14)]
    return torch.stack([found[call][row] for call, row, _ in at]), [place for *_, place in at]


@each_row("kind", WINDOWED)
def test_windows_are_kept_at_every_turn(kind):
    model = build(kind, **WINDOWED[kind])
    decoder = choose_decoder(model)()
    assert decoder.description.startswith("the model's own forward pass: it has ")
    found, places = decode(decoder)
    torch.testing.assert_close(found, logits(model, IDS)[places], atol=2e-5, rtol=2e-5)
    whole = logits(build(kind, **{**WINDOWED[kind], "sliding_window": 999}), IDS)
    assert (found - whole[places]).abs().max() > 1e-3, "the window shows"


@each_row("kind", ["llama", "mamba"])
def test_a_dialogue_that_is_read_again_for_every_token(kind):
    model = build(kind, **({"state_size": 4} if kind == "mamba" else {}))
    found, places = decode(UncachedDecoder(model, "it is tried"))
    torch.testing.assert_close(found, logits(model, IDS)[places], atol=2e-5, rtol=2e-5)


def test_a_model_without_keys_and_values_is_read_again():
    described = choose_decoder(build("mamba", state_size=4))().description
    assert described.startswith("the model's own forward pass over the whole dialogue: ")


def test_a_model_that_sees_later_tokens_is_refused():
    model = build("bert", is_decoder=False)
    with pytest.raises(SpecError, match=r"kind 'bert' cannot be sampled from: it has logits that"):
        choose_decoder(model)
