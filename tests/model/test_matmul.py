"""Matrix multiplication by oneDNN: the same numbers, chosen by a trial and kept."""

import copy
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlx.home import RunFolder
from rlx.learner import Ranks
from rlx.model import MatmulChoice, OneDnnLinear, choose_matmul
from rlx.model import matmul as products
from rlx.model.matmul import MARGIN, MIN_ROWS, TRIALS, apply_matmul
from rlx.run import matmul

ONEDNN, SLOWER = MatmulChoice("oneDNN", 2.0), MatmulChoice("torch", 1.0)
HERE = Ranks(0, 1, torch.device("cpu"))


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from([(MIN_ROWS,), (MIN_ROWS + 3,), (2, 70), (3, 5, 20), (7,), (2, 3)]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bias=st.booleans(),
    transposed=st.booleans(),
    expanded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_torch(shape, sizes, bias, transposed, expanded, seed):
    torch.manual_seed(seed)
    plain = nn.Linear(*sizes, bias=bias)
    if transposed:  # as the sampler's fused matrices leave it
        plain.weight.data = plain.weight.data.t().contiguous().t()
    mine = copy.deepcopy(plain)
    apply_matmul(mine, ONEDNN)
    found = []
    x, up = torch.randn(*shape, sizes[0]), torch.randn(*shape, sizes[1])
    if expanded:  # as the gradient of a sum
        up = torch.randn(()).expand(up.shape)
    for layer in (mine, plain):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(up)
        found.append((y.detach(), own.grad, *(p.grad for p in layer.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        assert torch.equal(mine(x), found[0][0]), "to the bit, with and without gradients"


def test_only_plain_layers_change_and_only_where_chosen():
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(2, 2), Own(2, 2), nn.Embedding(2, 2)])
    apply_matmul(model, MatmulChoice("torch", 1.0))
    assert [type(m) for m in model] == [nn.Linear, Own, nn.Embedding]
    apply_matmul(model, ONEDNN)
    assert [type(m) for m in model] == [OneDnnLinear, Own, nn.Embedding]
    assert isinstance(copy.deepcopy(model)[0], OneDnnLinear)


def test_other_dtypes_are_left_to_torch():
    layer = nn.Linear(3, 4, dtype=torch.float64)
    apply_matmul(layer, ONEDNN)
    x = torch.randn(2 * MIN_ROWS, 3, dtype=torch.float64)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_the_trial_decides():
    choice = choose_matmul()
    assert (choice.library == "oneDNN") == (choice.speedup is not None and choice.speedup >= MARGIN)
    assert (choice.library == "oneDNN") == (choice.smallest > 0)


@pytest.mark.parametrize(
    ("speedups", "choice"),
    [
        ((2, 3, 4), MatmulChoice("oneDNN", 4, 256 * 96 * 96)),
        ((0.5, 3, 4), MatmulChoice("oneDNN", 4, 512 * 96 * 256)),
        ((3, 0.5, 1.3), MatmulChoice("oneDNN", 1.3, 2816 * 96 * 256)),
        ((3, 3, 1.29), MatmulChoice("torch", 1.29)),
    ],
)
def test_a_product_goes_to_onednn_from_the_size_at_which_it_pays(speedups, choice, monkeypatch):
    by_shape = dict(zip(TRIALS, speedups, strict=True))
    monkeypatch.setattr(products, "_measure_speedup", lambda shape, _: by_shape[shape])
    assert choose_matmul() == choice


def test_smaller_products_are_left_to_torch(monkeypatch):
    by_onednn = []
    multiply = products._multiply
    monkeypatch.setattr(products, "_multiply", lambda *a: by_onednn.append(a) or multiply(*a))
    layer = nn.Sequential(nn.Linear(8, 4, bias=False))
    apply_matmul(layer, MatmulChoice("oneDNN", 2.0, 200 * 8 * 4))
    for rows in (MIN_ROWS, 199):
        x = torch.randn(rows, 8)
        assert torch.equal(layer(x), nn.functional.linear(x, layer[0].weight))
    assert not by_onednn
    layer(torch.randn(200, 8))
    assert len(by_onednn) == 1


def test_without_onednn_torch_multiplies(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose_matmul() == MatmulChoice("torch", None)
    assert str(choose_matmul()) == "torch"


@pytest.mark.parametrize("by", ["torch", "oneDNN"])
def test_a_choice_says_who_multiplies(by):
    assert (
        str(MatmulChoice(by, 1.84)) == f"{by} (in a trial oneDNN had 1.8 times the speed of torch)"
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A machine whose cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlx" / "matmul"


def find(monkeypatch, choice):
    """Has the next trials find this."""
    monkeypatch.setattr(matmul, "choose_matmul", lambda: choice)


def run_folder(path):
    path.mkdir()
    return RunFolder(path)


def test_a_run_keeps_its_choice(tmp_path, monkeypatch, cache):
    folder = run_folder(tmp_path / "run")
    find(monkeypatch, ONEDNN)
    assert matmul.keep_matmul(folder, HERE) == ONEDNN
    find(monkeypatch, SLOWER)
    shutil.rmtree(cache)
    assert matmul.keep_matmul(folder, HERE) == ONEDNN
    folder.matmul.unlink()
    (folder.checkpoints / "step_000001").mkdir(parents=True)
    assert matmul.keep_matmul(folder, HERE) == MatmulChoice(), "of a version that had none"
    assert matmul.keep_matmul(folder, Ranks(0, 1, torch.device("cuda"))) == MatmulChoice()


def test_all_runs_on_a_machine_choose_alike(tmp_path, monkeypatch, cache):
    find(monkeypatch, ONEDNN)
    assert matmul.keep_matmul(run_folder(tmp_path / "first"), HERE) == ONEDNN
    find(monkeypatch, SLOWER)
    assert matmul.keep_matmul(run_folder(tmp_path / "second"), HERE) == ONEDNN
    monkeypatch.setattr(matmul.platform, "machine", lambda: "another processor")
    assert matmul.keep_matmul(run_folder(tmp_path / "third"), HERE) == SLOWER
    assert len(list(cache.iterdir())) == 2


def test_of_runs_that_start_together_one_chooses(tmp_path, monkeypatch, cache):
    def choose_second():
        find(monkeypatch, ONEDNN)
        assert matmul.keep_matmul(run_folder(tmp_path / "first"), HERE) == ONEDNN
        return SLOWER

    monkeypatch.setattr(matmul, "choose_matmul", choose_second)
    assert matmul.keep_matmul(run_folder(tmp_path / "second"), HERE) == ONEDNN


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"library": 3, "no": 1}', b"\xff"])
def test_a_damaged_cache_means_a_trial(tmp_path, monkeypatch, cache, damage):
    find(monkeypatch, ONEDNN)
    matmul.keep_matmul(run_folder(tmp_path / "first"), HERE)
    [kept] = cache.iterdir()
    kept.write_bytes(damage)
    find(monkeypatch, SLOWER)
    assert matmul.keep_matmul(run_folder(tmp_path / "second"), HERE) == SLOWER
    find(monkeypatch, ONEDNN)
    assert matmul.keep_matmul(run_folder(tmp_path / "third"), HERE) == SLOWER, "kept again"
    assert list(cache.iterdir()) == [kept]


def test_a_machine_without_a_cache_has_its_trial(tmp_path, monkeypatch, cache):
    cache.parent.parent.write_text("a file")
    find(monkeypatch, ONEDNN)
    assert matmul.keep_matmul(run_folder(tmp_path / "run"), HERE) == ONEDNN
