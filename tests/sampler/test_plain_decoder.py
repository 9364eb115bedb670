"""The compact decoder beside the models that it stands for, and the choice between them."""

import copy
from dataclasses import replace

import torch
import transformers
from rows import each_row

from rlx.model import build_policy
from rlx.rollout import CompletionRequest
from rlx.sampler import TransformersSampler
from rlx.sampler.engine import choose_decoder
from rlx.spec import TinyModelSpec, TurnSpec

CPU = torch.device("cpu")
TINY = TinyModelSpec(
    hidden_size=64, heads=2, kv_heads=1, layers=2, intermediate_size=64, initializer_range=0.15
)
PLAIN = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": None, "head_dim": 24},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 24},
    "SmolLM3": {"no_rope_layer_interval": 2},
}
OTHERS = {
    "Gemma2": "in its layer",
    "Granite": "logits that differ from those of the plain decoder",
    "Mixtral": "in its",
    "Phi3": "in its layer",
}


def build(name, **options):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                torch.nn.init.normal_(parameter, 1, 0.2)
    return model


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]


IDS = list(range(5, 45))


# Numbers -----------------------------------------------------------------------------------------


@each_row("name", PLAIN)
def test_a_plain_model_s_logits_at_every_turn(name):
    model = build(name, **PLAIN[name])
    expected = logits(model, IDS)
    decoder = choose_decoder(model)()
    assert decoder.description == "compact decoder, shared ancestors"
    with torch.inference_mode():
        rows = decoder.start(2)
        found = [rows.read([IDS[:9], IDS[:5]], 0)]
        rows = rows.fork([0, 1, 0], 1)
        for step in range(3):
            found.append(rows.step(torch.tensor([IDS[9 + step], IDS[5 + step], 7])))
        rows = rows.select([0, 1], 0).fork([1, 0, 1], 2)
        found.append(rows.read([IDS[8:12], IDS[12:30], IDS[8:10]], 1))
        found.append(rows.step(torch.tensor([IDS[12], IDS[30], IDS[10]])))
    at = [(0, 0, 8), (0, 1, 4), (1, 0, 9), (3, 0, 11), (3, 1, 7)]
    at += [(4, 0, 11), (4, 1, 29), (4, 2, 9), (5, 0, 12), (5, 1, 30), (5, 2, 10)]
    for call, row, place in at:
        torch.testing.assert_close(found[call][row], expected[place], atol=2e-5, rtol=2e-5)


@each_row("name", PLAIN)
def test_so_in_bfloat16(name):
    model = build(name, **PLAIN[name]).to(torch.bfloat16)
    assert choose_decoder(model)().description.startswith("compact")


@each_row(("name", "why"), OTHERS.items())
def test_a_model_that_is_not_plain_is_called_as_it_is(name, why):
    options = {"embedding_multiplier": 12.0} if name == "Granite" else {}
    described = choose_decoder(build(name, **options))().description
    assert described.startswith("the model's own forward pass: it has ")
    assert why in described


# Weights -----------------------------------------------------------------------------------------


def test_weights_are_held_once_and_mean_the_same():
    model = build("Qwen2", tie_word_embeddings=True)
    expected = logits(model, IDS)
    choose_decoder(model)
    parts = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    held = sum(storage.nbytes() for storage in parts.values())
    assert held == sum(p.nbytes for p in model.parameters())
    torch.testing.assert_close(logits(model, IDS), expected)
    loaded = build("Qwen2", tie_word_embeddings=True)
    for parameter in loaded.parameters():
        parameter.data.zero_()
    loaded.load_state_dict(model.state_dict())
    for again in (copy.deepcopy(model), loaded):
        torch.testing.assert_close(logits(again, IDS), expected)


def greedy(sampler):
    with sampler.session() as session:
        (said,) = session.generate([CompletionRequest(tuple(IDS), None, (1,))], TurnSpec(top_k=1))
    return said


def test_whoever_replaces_weights_they_are_those_sampled_from():
    own, source = (replace(build_policy(TINY, seed), end_ids=()) for seed in (1, 2))
    first = TransformersSampler(own, max_rows=4, device=CPU)
    before, originals = greedy(first), copy.deepcopy(own.model).parameters()
    second = TransformersSampler(own, max_rows=4, device=CPU)
    second.load(dict(source.model.named_parameters()))
    after = greedy(first)
    assert after == greedy(second) == greedy(TransformersSampler(source, max_rows=4, device=CPU))
    for parameter, original in zip(own.model.parameters(), originals, strict=True):
        parameter.data = original.data
    assert greedy(first) == before != after


def test_inference_mode_around_a_sampler_leaves_weights_trainable():
    policy = build_policy(TINY, 0)
    with torch.inference_mode():
        TransformersSampler(policy, max_rows=4, device=CPU)
    policy.model(input_ids=torch.tensor([IDS])).logits.sum().backward()
    assert all(p.grad is not None and not p.is_inference() for p in policy.model.parameters())
