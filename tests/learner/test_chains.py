"""Chain attention against masked attention and against its definition, on CPU."""

from collections import defaultdict
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.learner import attention, chains, flash
from rlx.learner.attention import AttentionBlocks
from rlx.learner.chains import AttentionChains, attend_chains
from rlx.learner.forms import favours_chains
from rlx.learner.pack import PackedBatch, PackedBranches

SCALE = 0.3


def pack(*trees):
    """Positions and ends of trees in depth-first order.

    Args:
        trees: for each, its chains as (number of the chain above, tokens); the first has none.
    """
    positions, ends = [], []

    def walk(number, depth):
        start, length = len(ends), tree[number][1]
        positions.extend(range(depth, depth + length))
        ends.extend([0] * length)
        for child in below[number]:
            walk(child, depth + length)
        ends[start : start + length] = [len(ends)] * length

    for tree in trees:
        below = defaultdict(list)
        for number, (above, _) in enumerate(tree[1:], start=1):
            below[above].append(number)
        walk(0, 0)
    return torch.tensor(positions), torch.tensor(ends)


@st.composite
def packs(draw, longest=40, most=8):
    """Packs of some trees: forks at any depth, chains of one token and of several runs."""
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, most))
        lengths = [draw(st.sampled_from([1, 2, 3, 7, longest])) for _ in range(count)]
        trees.append(
            [(draw(st.integers(0, max(0, n - 1))), length) for n, length in enumerate(lengths)]
        )
    return pack(*trees)


@st.composite
def cuts(draw):
    """How long runs are, as a context manager: short ones cut short chains."""
    run, last = draw(st.sampled_from([(1, 0), (2, 1), (5, 2), (chains.RUN, chains.LAST)]))
    return patch.multiple(chains, RUN=run, LAST=last)


def see(ends):
    """`[L, L]` bool: which tokens each one attends to."""
    at = torch.arange(len(ends))
    return (at <= at[:, None]) & (at[:, None] < ends)


def attend_by_definition(query, key, value, ends):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.mT * SCALE).masked_fill(~see(ends), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def states(length, heads=(4, 2, 2), width=8, dtype=torch.float32):
    """Queries, keys and values as a model has them: by token, seen by head."""
    generator = torch.Generator().manual_seed(length)
    made = (torch.randn(1, length, n, width, generator=generator, dtype=dtype) for n in heads)
    return [x.transpose(1, 2).requires_grad_() for x in made]


def measure(attend, inputs):
    """The output, and all gradients in one vector."""
    output = attend(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return output.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def apart(found, expected):
    """The larger relative L2 distance of the two."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


# What it computes --------------------------------------------------------------------------------


@given(packs(), cuts())
def test_every_token_attends_to_its_path_once(pack, cut):
    with cut:
        layout = AttentionChains.from_positions(*pack)
    seen = torch.zeros(len(pack[1]), len(pack[1]), dtype=torch.int64)
    for tokens, real in zip(layout.runs, layout.real, strict=True):
        for n, run in enumerate(tokens):
            own = run if real is None else run[real[n, 0, :, 0]]
            assert torch.equal(own, torch.arange(own[0], own[-1] + 1)), "a run is consecutive"
            assert (run[len(own) :] == own[-1]).all()
            seen[own[:, None], own] += torch.ones(len(own), len(own)).tril().long()
    for start, middle, stop in layout.spans:
        seen[middle:stop, start:middle] += 1
    assert torch.equal(seen, see(pack[1]).long())
    taken = torch.cat([tokens.flatten() for tokens in layout.runs])[layout.places]
    assert torch.equal(taken, torch.arange(len(taken)))


@given(packs(), cuts(), st.sampled_from([(4, 2, 2), (3, 1, 1), (2, 2, 2)]))
def test_values_and_gradients_are_those_of_masked_attention(pack, cut, heads):
    positions, ends = pack
    with cut:
        layout = AttentionChains.from_positions(positions, ends)
    blocks = AttentionBlocks.from_positions(positions, ends)

    def attend(layout):
        def attend_packed(*inputs):
            return attention._compute_packed_attention(
                None, *inputs, None, scaling=SCALE, rlx_layout=layout
            )[0]

        return attend_packed

    inputs = states(len(ends), heads)
    found = measure(attend(layout), inputs)
    assert apart(found, measure(attend(blocks), inputs)) <= 5e-6
    assert apart(found, measure(lambda *x: attend_by_definition(*x, ends), inputs)) <= 5e-6
    again = measure(attend(layout), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "to the bit"


@settings(max_examples=5)
@given(packs(longest=6, most=4), cuts())
def test_gradients_are_right_in_double_precision(pack, cut):
    positions, ends = pack
    with cut:
        layout = AttentionChains.from_positions(positions, ends)
    inputs = states(len(ends), width=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *x: attend_chains(*x, layout, SCALE), inputs, fast_mode=True
    )


def test_sums_of_half_precision_are_in_float32():
    """Twenty results are merged for the last token: rounded each time, they would be far off."""
    positions, ends = pack([(max(0, n - 1), 3) for n in range(20)] + [(n, 1) for n in range(20)])
    layout = AttentionChains.from_positions(positions, ends)
    exact = states(len(ends), dtype=torch.float64)
    expected = measure(lambda *x: attend_by_definition(*x, ends), exact)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    found = measure(lambda *x: attend_chains(*x, layout, SCALE), rounded)
    assert all(x.dtype == torch.bfloat16 for x in found)
    assert apart([x.double() for x in found], expected) < 0.01


# What it costs -----------------------------------------------------------------------------------


def test_it_keeps_its_inputs_its_output_and_a_number_for_each_head():
    positions, ends = pack([(0, 300), *[(0, 900)] * 4])
    layout = AttentionChains.from_positions(positions, ends)
    inputs, kept = states(len(ends)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = attend_chains(*inputs, layout, SCALE)
    assert sum(x.numel() for x in kept) == sum(x.numel() for x in (*inputs, output)) + 4 * len(ends)


def test_a_long_chain_is_cut_into_runs_of_one_length():
    layout = AttentionChains.from_positions(*pack([(0, 1000)]))
    assert [tuple(run.shape) for run in layout.runs] == [(8, 128)]
    assert layout.spans[0] == (0, 512, 1000)
    assert len(layout.spans) == 7


# When it is used ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "long"),
    [
        ([(0, 200), *[(0, 1000)] * 8], True),  # answers
        ([(0, 200), *[(0, 330)] * 8, *[(1 + n // 8, 20) for n in range(64)]], True),
        ([(0, 40), *[(0, 38)] * 8, *[(1 + n // 4, 6) for n in range(32)]], False),
        ([(n // 2, 10) for n in range(300)], False),  # forks everywhere
        ([(0, 1)], True),
    ],
)
def test_long_chains_are_worth_their_merges(tree, long):
    positions, ends = pack(tree)
    none = torch.zeros(0, dtype=torch.int64)
    packed = PackedBatch(
        positions, positions, ends, none, none, none, none, PackedBranches(*[none] * 6)
    )
    assert favours_chains(packed) is long


def test_a_window_needs_a_mask():
    positions, ends = pack([(0, 30)])
    layout = AttentionChains.from_positions(positions, ends)

    def attend(window):
        return attention._compute_packed_attention(
            None, *states(30), None, sliding_window=window, rlx_layout=layout
        )[0]

    assert torch.equal(attend(None), attend(30))
    with pytest.raises(ValueError, match="a window of 29 tokens"):
        attend(29)


# Kernels of a GPU --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_a_gpu_take_what_they_are_given(dtype, causal):
    """Without a GPU, their operations are known by shapes alone."""
    query = torch.empty(2, 4, 40, 16, dtype=dtype, device="meta")
    key = torch.empty(2, 2, 40 if causal else 50, 16, dtype=dtype, device="meta")
    output, logsumexp = flash.attend(query, key, key, causal=causal, scale=None)
    assert output.shape == query.shape and output.dtype == dtype
    assert logsumexp.shape == query.shape[:3] and logsumexp.dtype == torch.float32
    gradients = flash.differentiate(
        *(output, query, key, key, output, logsumexp), causal=causal, scale=None
    )
    for gradient, states in zip(gradients, (query, key, key), strict=True):
        assert gradient.shape == states.shape and gradient.dtype == dtype
