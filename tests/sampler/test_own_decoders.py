"""Decoders that call the model itself: with attention windows, and without a cache."""

from dataclasses import replace

import pytest
import torch
from rows import each_row
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlx.errors import SpecError
from rlx.model import build_policy, find_window
from rlx.rollout import CompletionRequest
from rlx.sampler import TransformersSampler
from rlx.sampler.engine import choose_decoder, choose_own_decoder
from rlx.sampler.own_forward import UncachedDecoder
from rlx.spec import TinyModelSpec, TurnSpec

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
    decoder = choose_own_decoder(model, "it is tried")()
    assert decoder.description == "the model's own forward pass: it is tried"
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


# Dialogues that outgrow the window ---------------------------------------------------------------


def complete(sampler, context, count, follow=()):
    """One completion of the context, and one of what follows it in the same session."""
    sampling = TurnSpec(max_new_tokens=count)
    with sampler.session() as session:
        ((first,),) = session.generate([CompletionRequest(context, None, (1,))], sampling)
        if not follow:
            return [(context, first)]
        longer = (*context, *first.token_ids, *follow)
        ((second,),) = session.generate([CompletionRequest(longer, 0, (2,))], sampling)
        return [(context, first), (longer, second)]


def test_a_dialogue_that_outgrows_its_window_goes_on_with_the_model_itself():
    tiny = build_policy(TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1), 0)
    model = build("mistral", sliding_window=24)
    assert find_window(model.config) == 24
    policy = replace(tiny, model=model, end_ids=())
    sampler = TransformersSampler(policy, max_rows=4, device=torch.device("cpu"))
    assert sampler.description == (
        "compact decoder, shared ancestors; beyond it the model's own forward pass: a dialogue is "
        "longer than its attention window of 24"
    )
    turns = complete(sampler, tuple(IDS[:8]), 6, follow=tuple(IDS[8:30]))
    assert [len(context) for context, _ in turns] == [8, 36]
    for context, said in turns:
        expected = logits(model, [*context, *said.token_ids])[len(context) - 1 : -1]
        logprobs = torch.log_softmax(expected, dim=-1)
        chosen = logprobs.gather(1, torch.tensor(said.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(said.logprobs), chosen, atol=2e-5, rtol=2e-5)
