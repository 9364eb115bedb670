"""Logits by chunks of the vocabulary, against whole ones."""

import copy

import pytest
import torch
from checkpoints import build_model
from rows import each_row

from rlx.kl import kl_terms
from rlx.learner import PackedPolicy, Ranks, forward
from rlx.learner.forward import choose_form, choose_logits, compute_token_logprobs
from rlx.learner.pack import Branches, pack_rows
from rlx.spec import RunnerSpec

HERE = Ranks(0, 1, torch.device("cpu"))


def compute_whole(hidden, weight, bias, temperatures, states, tokens):
    """The definition."""
    z = torch.nn.functional.linear(hidden, weight, bias).float() / temperatures[:, None]
    logprobs = z.log_softmax(dim=-1)
    return logprobs[states, tokens], -(logprobs.exp() * logprobs).sum(dim=-1)


@each_row("biased", [False, True])
@each_row("chunk", [1, 7, 50, 64])
@each_row("scale", [1.0, 60.0], ids=["flat", "peaked"])
def test_results_and_gradients_are_those_of_whole_logits(biased, chunk, scale, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    real = {"generator": generator, "dtype": torch.float32}
    hidden, weight, bias = (torch.randn(*s, **real) for s in [(9, 6), (50, 6), (50,)])
    temperatures = torch.rand(9, **real) + 0.5
    states = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 2])  # branches repeat a state
    tokens = torch.randint(50, (11,), generator=generator)
    reference = -torch.rand(11, **real) * 5
    found = []
    monkeypatch.setattr(forward, "CHUNK", chunk)
    for compute in (compute_whole, compute_token_logprobs):
        leaves = [
            (scale * hidden).requires_grad_(), weight.clone().requires_grad_(),
            bias.clone().requires_grad_() if biased else None,
        ]  # fmt: skip
        logprobs, entropy = compute(*leaves, temperatures, states, tokens)
        penalty = kl_terms(logprobs, reference, "k2").sum()
        loss = (logprobs * torch.linspace(-1, 1, 11)).sum() + penalty + (entropy**2).sum()
        gradients = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])
        found.append((logprobs, entropy, penalty, *gradients))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, atol=2e-5, rtol=2e-4)


def module_of(kind, **options):
    module = PackedPolicy(build_model(kind, num_hidden_layers=1, **options))
    choose_form(module, HERE)
    return module


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(forward, "WHOLE_LOGITS", 0)


def test_small_logits_stay_whole():
    module = module_of("qwen2")
    assert choose_logits(module, RunnerSpec(), HERE) == ""
    assert not module.chunks_logits


@pytest.mark.parametrize("tied", [True, False])
def test_large_logits_are_chunked(small_limit, tied):
    module = module_of("qwen2", tie_word_embeddings=tied)
    whole = copy.deepcopy(module)
    assert choose_logits(module, RunnerSpec(), HERE) == "logits by chunks of 8192 tokens"
    packed = pack_rows(*forward._build_trial_rows(module))
    temperatures = torch.ones(len(packed.targets))
    results = []
    for each in (whole, module):
        logprobs, entropy = each(packed, temperatures)
        assert logprobs.requires_grad and not entropy.requires_grad
        (-logprobs.sum()).backward()
        with torch.no_grad():
            *_, collisions = each(packed, 0.8 * temperatures, with_collisions=True)
        results.append((logprobs, entropy, collisions, *(p.grad for p in each.parameters())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("kind", "options", "stage", "why"),
    [
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 1.0}, 1, "results differ"),
        ("qwen2", {}, 3, "zero_stage 3 shards the output layer"),
    ],
)
def test_models_that_need_whole_logits_say_why(small_limit, kind, options, stage, why):
    module = module_of(kind, initializer_range=1.0, **options)
    assert choose_logits(module, RunnerSpec(zero_stage=stage), HERE).startswith(
        f"whole logits: {why}"
    )
    assert not module.chunks_logits


def test_branches_are_those_of_whole_logits(small_limit):
    module = module_of("qwen2")
    rows = forward._build_trial_rows(module)
    branches = Branches(
        rows=torch.tensor([0, 1, 1]),
        starts=torch.tensor([33, 36, 36]),
        tokens=((5,), (6, 7), (8,)),
    )
    packed = pack_rows(*rows, branches=branches)
    temperatures = torch.ones(len(packed.targets)), torch.full((len(packed.branches.at),), 0.7)
    expected = module(packed, *temperatures, learns_entropy=True)
    choose_logits(module, RunnerSpec(), HERE)
    assert module.chunks_logits
    for a, b in zip(module(packed, *temperatures, learns_entropy=True), expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)
    assert len(expected) == 3 and len(expected[2]) == 4
