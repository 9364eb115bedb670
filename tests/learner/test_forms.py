"""Every form of computing packed trees, on every kind of model it is chosen for, on CPU."""

import pytest
import torch
from checkpoints import build_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention

from rlx.learner.distributed import Ranks
from rlx.learner.forms import (
    CachedForm,
    FlexForm,
    GroupedForm,
    PlainForm,
)
from rlx.learner.forward import FORMS, PackedPolicy, choose_form
from rlx.learner.pack import pack_rows
from rlx.model.lora import adapt_model
from rlx.spec import Lora

HERE = Ranks(0, 1, torch.device("cpu"))
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CHOSEN = {
    "qwen2": ({}, GroupedForm),
    "qwen3": ({"head_dim": 16}, GroupedForm),
    "llama": ({}, GroupedForm),
    "mistral": ({"sliding_window": None}, GroupedForm),
    "smollm3": ({}, GroupedForm),
    "phi3": ({}, GroupedForm),
    "gpt_neox": ({}, GroupedForm),
    "qwen3_moe": (EXPERTS, GroupedForm),
    "gemma2": ({"head_dim": 16}, CachedForm),
    "bloom": ({}, PlainForm),
    "mamba": ({"state_size": 4}, PlainForm),
}
"""By architecture: options beyond the sizes, and the form that is right for it on a CPU.

Gemma 2 caps its scores, Bloom knows no position ids, and Mamba has no attention at all."""


def model_of(kind):
    return build_model(kind, initializer_range=0.2, **CHOSEN[kind][0])


@pytest.fixture(params=CHOSEN)
def kind(request):
    return request.param


@pytest.fixture
def chosen(kind):
    module = PackedPolicy(model_of(kind))
    return module, choose_form(module, HERE)


def test_the_first_form_that_fits_is_chosen_and_the_others_are_explained(kind, chosen):
    module, choice = chosen
    assert type(choice.form) is CHOSEN[kind][1]
    assert module.form is choice.form
    assert len(choice.refused) == FORMS["cpu"].index(choice.form)
    assert all(reason in str(choice) for reason in choice.refused)


@pytest.mark.parametrize(
    ("kind", "options", "form"),
    [
        ("mistral", {}, GroupedForm),
        ("olmo3", {"layer_types": ["sliding_attention", "full_attention"]}, GroupedForm),
        ("gemma2", {"head_dim": 16}, CachedForm),
    ],
)
def test_windows_are_kept_where_prefixes_are_shared(kind, options, form):
    """A window of 40 is longer than the rows of the trial and shorter than those here."""
    model = build_model(kind, initializer_range=0.2, sliding_window=40, **options)
    module = PackedPolicy(model)
    assert type(choose_form(module, HERE).form) is form
    ids = torch.randint(3, 50, (4, 90), generator=torch.Generator().manual_seed(2))
    ids[:, :50] = ids[0, :50]
    ids[2:, 50:60] = ids[2, 50:60]
    is_token = torch.arange(90) < torch.tensor([[90], [75], [61], [88]])
    forest = ids, is_token, is_token & (torch.arange(90) >= 45)
    expected = check_form(module, module.form, forest)
    model.config.sliding_window = 4096
    module.use(PlainForm())
    assert (measured(module, forest)[0] - expected).abs().max() > 1e-3, "the window shows"


def test_a_window_that_cannot_be_narrowed_shares_nothing():
    layers = {"attention_types": [[["local"], 2]], "window_size": 40}
    model = build_model("gpt_neo", max_position_embeddings=128, **layers)
    choice = choose_form(PackedPolicy(model), HERE)
    assert type(choice.form) is PlainForm
    assert all("windows cannot be tried" in reason for reason in choice.refused)


@st.composite
def forests(draw):
    """Token rows of a few trees in which any two rows may share any prefix; the trees may have one
    in common."""
    rows, trees = [], []
    system = draw(st.lists(st.integers(3, 49), max_size=40))
    for tree in range(draw(st.integers(1, 3))):
        prompt = system + draw(st.lists(st.integers(3, 5), min_size=1, max_size=50))
        for _ in range(draw(st.integers(1, 4))):
            known = draw(
                st.sampled_from(
                    [r for r, t in zip(rows, trees, strict=True) if t == tree] or [prompt]
                )
            )
            kept = draw(st.integers(1, len(known)))
            rows.append(known[:kept] + draw(st.lists(st.integers(3, 5), min_size=1, max_size=40)))
            trees.append(tree)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    is_token = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    want = is_token & (
        torch.rand(ids.shape, generator=torch.Generator().manual_seed(len(rows))) < 0.3
    )
    want[:, 0] = False
    return ids, is_token, want


def measured(module, forest):
    """Log-probabilities and entropies by row and column, and every parameter's gradient."""
    ids = forest[0]
    packed = pack_rows(*forest, merge=module.form.merges)
    module.zero_grad()
    logprobs, entropy = module(packed, torch.full((len(packed.targets),), 0.7))
    weights = (packed.rows * 31 + packed.columns * 17) % 7 - 3.0
    ((logprobs + 0.1 * entropy) * weights).sum().backward()
    found = torch.zeros(2, *ids.shape)
    found[:, packed.rows, packed.columns] = torch.stack([logprobs, entropy]).detach()
    return found, {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def check_form(module, form, forest):
    """A form has the results of plain rows, which are returned, and their gradient."""
    module.use(PlainForm())
    expected, gradient = measured(module, forest)
    module.use(form)
    found, own = measured(module, forest)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=2e-6)
    assert own.keys() == gradient.keys()
    distance = sum((own[n] - gradient[n]).square().sum() for n in gradient)
    assert distance <= 5e-6**2 * sum(tensor.square().sum() for tensor in gradient.values())
    return expected


@pytest.fixture(scope="module")
def qwen():
    return PackedPolicy(model_of("qwen3"))


@settings(max_examples=10)
@given(forest=forests())
@pytest.mark.parametrize("form", [GroupedForm(), CachedForm()], ids=lambda form: form.name)
def test_values_and_gradients_are_those_of_plain_rows(qwen, form, forest):
    if forest[2].any():
        check_form(qwen, form, forest)


def test_every_kind_of_model_learns_as_from_plain_rows(kind, chosen):
    module, _ = chosen
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, 50, (1, 70), generator=generator).expand(6, -1)
    ids = torch.cat([prompt, torch.randint(3, 50, (6, 40), generator=generator)], dim=1)
    ids[3:, 70:85] = ids[3, 70:85]
    is_token = torch.arange(110) < torch.tensor([[110], [95], [71], [110], [101], [88]])
    check_form(module, module.form, (ids, is_token, is_token & (torch.arange(110) >= 70)))


def draw_tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 50, (count,), generator=generator).tolist()


def grow_rows(prompts, *, two_turns=False):
    """Two answers to every prompt, their first tokens equal, with two confidences each."""
    rows, learned = [], []
    for n, prompt in enumerate(prompts):
        for k in range(2):
            answer = [*prompt, 7, 8, *draw_tokens(5 + 9 * k, 10 * n + k)]
            rows.append(answer)
            learned.append(len(prompt))
            if two_turns:
                asked = [*answer, 9, 9]
                rows += [asked + draw_tokens(2 + c, 100 + 10 * n + k + c) for c in range(2)]
                learned += [len(asked)] * 2
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    is_token = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    return ids, is_token, is_token & (torch.arange(width) >= torch.tensor(learned)[:, None])


def test_a_cache_with_gradient_reads_every_shared_prefix_once(qwen):
    """Tokens of the rectangles that are read: what all share, the rest of each prompt, and the
    answers, padded; those of one prompt stay together where the longest is as long."""
    read = []

    def note(at, **arguments):
        read.append(tuple(arguments["input_ids"].shape))
        return torch.zeros(len(at), 1)

    system = draw_tokens(70, 0)
    one_prefix = [system + draw_tokens(9, n) for n in (1, 2, 3)]
    nothing_in_common = [[n, *draw_tokens(30, n)] for n in (3, 4, 5)]
    forests = grow_rows(one_prefix), grow_rows(nothing_in_common)
    for forest in (*forests, grow_rows(one_prefix, two_turns=True)):
        CachedForm()(note, pack_rows(*forest))
    assert read == [(1, 70), (3, 11), (6, 14), (3, 33), (6, 14), (1, 1), (1, 70), (3, 11), (6, 21)]


@pytest.fixture
def flex_on_the_cpu(monkeypatch):
    """Flex attention with a backward pass, which torch only refuses on a CPU: its graphs run there
    as they are, and nothing is compiled."""
    compiled, flex = torch.compile, flex_attention.flex_attention

    def compile_flex(function=None, **options):
        if function is flex:
            options = {"backend": "aot_eager"}
        return compiled(function, **options)

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", compile_flex)
    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)
    monkeypatch.setattr(WrappedFlexAttention, "_is_flex_compiled", False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("flex_on_the_cpu")
def test_flex_attention_learns_as_plain_rows_do(qwen):
    ids = torch.randint(3, 50, (4, 60), generator=torch.Generator().manual_seed(1))
    ids[:, :40] = ids[0, :40]
    ids[2:, 40:45] = ids[2, 40:45]
    want = torch.zeros_like(ids, dtype=torch.bool)
    want[:, 30:] = True
    check_form(qwen, FlexForm(), (ids, ids > 0, want))


def test_an_empty_micro_batch_has_a_gradient_of_zeros_in_every_form(qwen):
    for form in FORMS["cpu"]:
        qwen.use(form)
        qwen.zero_grad()
        nothing = torch.zeros(1, 1, dtype=torch.int64)
        logprobs, _ = qwen(pack_rows(nothing, nothing == 0, nothing != 0), torch.ones(0))
        logprobs.sum().backward()
        assert all((p.grad == 0).all() for p in qwen.parameters())


def test_an_adapter_as_it_begins_shares_prefixes():
    """Its A has no gradient as long as its B is zero, which says nothing about a form."""
    model = model_of("qwen2")
    adapt_model(model, Lora(rank=2), 0)
    choice = choose_form(PackedPolicy(model), HERE)
    assert type(choice.form) is GroupedForm, str(choice)
