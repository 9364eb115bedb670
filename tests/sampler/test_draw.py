"""From logits to tokens: what may be drawn, how often, and from whose randomness."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import each_row

from rlx.sampler.draw import compute_sampling_logprobs, sample_tokens, sample_uniforms
from rlx.spec import TurnSpec

LOGITS = torch.log(torch.tensor([[0.4, 0.05, 0.3, 0.05, 0.2]]))


@pytest.fixture(params=[None, 2, 5], ids=["whole", "blocks of 2", "blocks of 5"])
def _by_blocks(request):
    """A token is found in the whole vocabulary, or in a block of it."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param is not None:
            patched.setattr("rlx.sampler.draw.LARGE", 0)
            patched.setattr("rlx.sampler.draw.BLOCK", request.param)
        yield


def probabilities(**sampling):
    return compute_sampling_logprobs(LOGITS, TurnSpec(**sampling)).exp()[0].tolist()


def test_temperature_sharpens_and_flattens():
    weights = [p**2 for p in (0.4, 0.05, 0.3, 0.05, 0.2)]
    sharp = [w / sum(weights) for w in weights]
    assert probabilities(temperature=0.5) == pytest.approx(sharp)


def test_top_k_keeps_the_largest_and_renormalises():
    assert probabilities(top_k=2) == pytest.approx([4 / 7, 0, 3 / 7, 0, 0])
    assert probabilities(top_k=1) == [1, 0, 0, 0, 0]
    assert probabilities(top_k=99) == pytest.approx(probabilities())


@each_row(
    ("top_p", "kept"),
    [(0.3, [0]), (0.41, [0, 2]), (0.69, [0, 2]), (0.75, [0, 2, 4]), (0.999, [0, 1, 2, 3, 4])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    found = probabilities(top_p=top_p)
    assert [i for i, p in enumerate(found) if p > 0] == kept
    assert sum(found) == pytest.approx(1)


def test_top_k_comes_before_top_p():
    # Of the two that top_k leaves, the first holds 4/7; without top_k it would hold 0.4.
    assert probabilities(top_k=2, top_p=0.5) == [1, 0, 0, 0, 0]
    assert probabilities(top_p=0.5) == pytest.approx([4 / 7, 0, 3 / 7, 0, 0])


@pytest.mark.usefixtures("_by_blocks")
@pytest.mark.parametrize(
    "sampling", [{}, {"top_k": 2}, {"top_p": 0.75}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}]
)
def test_evenly_spread_numbers_are_shared_out_by_probability(sampling):
    n = 10_000
    logprobs = compute_sampling_logprobs(LOGITS, TurnSpec(**sampling))
    tokens = sample_tokens(logprobs.expand(n, -1), (torch.arange(n, dtype=torch.float64) + 0.5) / n)
    shares = torch.bincount(tokens, minlength=5) / n
    torch.testing.assert_close(shares, logprobs.exp()[0], atol=1 / n, rtol=0)
    assert (shares[logprobs[0] == -math.inf] == 0).all()


@pytest.mark.usefixtures("_by_blocks")
@given(
    logits=st.lists(st.floats(-80, 80, width=32), min_size=2, max_size=12),
    forbidden=st.sets(st.integers(0, 11)),
    uniform=st.sampled_from([0.0, 2**-53, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
)
def test_what_has_probability_zero_is_never_drawn(logits, forbidden, uniform):
    logits = torch.tensor([logits])
    cut = [i for i in forbidden if i < logits.shape[1]][: logits.shape[1] - 1]
    logits[0, cut] = -torch.inf
    logprobs = compute_sampling_logprobs(logits, TurnSpec())
    token = int(sample_tokens(logprobs, torch.tensor([uniform], dtype=torch.float64)))
    assert logprobs[0, token].double().exp() > 0


def test_every_seed_has_a_stream_of_its_own():
    seeds = [7, 2**62 + 1, 0]
    together = sample_uniforms(seeds, 9)
    assert together.shape == (3, 9)
    assert together.dtype == torch.float64
    for row, seed in zip(together, seeds, strict=True):
        assert torch.equal(sample_uniforms([seed], 9)[0], row)
        assert torch.equal(sample_uniforms([seed], 4)[0], row[:4])
    assert len(set(together.flatten().tolist())) == 27
    assert 0 <= together.min() <= together.max() < 1
