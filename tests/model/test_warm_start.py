"""Warm starts: trained once, kept by everything that decides them, never kept by halves."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rows import each_row

from rlx.model import (
    build_demonstration_batches,
    build_policy,
    read_warm_start_losses,
    warm_start,
    warm_start_policy,
)
from rlx.model.warm_start import (
    ORIGIN,
    SHIPPED,
    compute_demonstration_digest,
    compute_settings_digest,
)
from rlx.phase_setup import build_setup
from rlx.plan import read_spec
from rlx.sealed_folder import MANIFEST, check_sealed_folder, write_manifest

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"
SMALL = (
    "model.hidden_size=32",
    "model.heads=1",
    "model.kv_heads=1",
    "model.layers=1",
    "model.intermediate_size=32",
    "model.warm_start.steps=3",
    "model.warm_start.batch_size=4",
)


class Watched:
    """Remembers the steps that were trained."""

    def __init__(self):
        self.steps = []

    def __call__(self, step, steps, loss):
        assert steps == 3
        self.steps.append(step)


def warm(cache, *overrides, tell=lambda _: None):
    spec = read_spec(RLCR, [*SMALL, *overrides]).spec
    policy = build_policy(spec.model, spec.seed)
    fresh = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    watched = Watched()
    folder = warm_start_policy(policy, spec, build_setup(spec).task, cache, watched, tell=tell)
    trained = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    assert all(p.grad is None for p in policy.model.parameters()), "training begins with none"
    return folder, watched, fresh, trained


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_it_is_trained_once_and_then_loaded(tmp_path):
    folder, watched, fresh, trained = warm(tmp_path)
    assert watched.steps == [1, 2, 3]
    assert not same(fresh, trained)
    assert folder.parent == tmp_path
    again, unasked, _, loaded = warm(tmp_path)
    assert (again, unasked.steps) == (folder, [])
    assert same(trained, loaded)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """The shipped result of the settings of these tests, trained here; and its weights."""
    folder, _, _, trained = warm(tmp_path / "made")
    spec = read_spec(RLCR, SMALL).spec
    policy, task = build_policy(spec.model, spec.seed), build_setup(spec).task
    batches = build_demonstration_batches(policy, spec, task)
    target = tmp_path / "examples" / SHIPPED / compute_settings_digest(batches.player, policy)
    shutil.copytree(folder, target)
    (target / ORIGIN).write_text(
        json.dumps({"demonstrations": compute_demonstration_digest(batches)})
    )
    (target / MANIFEST).unlink()
    write_manifest(target)
    monkeypatch.setattr(warm_start, "locate_examples", lambda: tmp_path / "examples")
    return target, trained


def test_a_shipped_result_is_taken_in_place_of_training(tmp_path, shipped):
    _, trained = shipped
    folder, watched, _, loaded = warm(tmp_path / "cache")
    assert watched.steps == [] and same(trained, loaded)
    assert folder.parent == tmp_path / "cache"
    assert len(read_warm_start_losses(folder)) == 3
    _, others, *_ = warm(tmp_path / "cache", "seed=1")
    assert others.steps == [1, 2, 3]


def test_a_shipped_result_of_other_demonstrations_is_not_taken(tmp_path, shipped):
    target, _ = shipped
    (target / ORIGIN).write_text(json.dumps({"demonstrations": "of another version"}))
    for complaint in (f"{ORIGIN} has changed", "it learned other demonstrations"):
        said = []
        _, watched, *_ = warm(tmp_path / complaint[:2], tell=said.append)
        assert watched.steps == [1, 2, 3]
        assert len(said) == 1 and complaint in said[0]
        (target / MANIFEST).unlink()
        write_manifest(target)


def test_the_demo_begins_with_a_shipped_result():
    """`make warm-starts` trains all of it again; here its first steps."""
    spec = read_spec(RLCR, []).spec
    policy, task = build_policy(spec.model, spec.seed), build_setup(spec).task
    batches = build_demonstration_batches(policy, spec, task)
    folder = RLCR.parent / SHIPPED / compute_settings_digest(batches.player, policy)
    check_sealed_folder(folder)
    origin = json.loads((folder / ORIGIN).read_text())
    assert origin["demonstrations"] == compute_demonstration_digest(batches)
    losses, expected = [], read_warm_start_losses(folder)

    def stop_early(step, steps, loss):
        losses.append(loss)
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start_policy(policy, spec, task, folder.parent, stop_early, use_shipped=False)
    assert losses == pytest.approx(expected[:2], rel=1e-5) and len(expected) == 800


@each_row(
    "change",
    [
        "seed=1",
        "model.warm_start.learning_rate=1e-3",
        "model.initializer_range=0.03",
        "task.number_range=[1, 19]",
        'rollout.confidence.template="sure? "',
        'rollout.answer.stop=["</think>"]',
    ],
)
def test_whatever_decides_the_result_trains_anew(tmp_path, change):
    folder, *_ = warm(tmp_path)
    other, watched, *_ = warm(tmp_path, change)
    assert other != folder
    assert watched.steps == [1, 2, 3]


def test_breaking_off_while_saving_leaves_no_half_result(tmp_path, monkeypatch):
    from transformers import PreTrainedModel

    def disk_full(self, folder, **_):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="No space left"):
        broken.setattr(PreTrainedModel, "save_pretrained", disk_full)
        warm(tmp_path)
    assert list(tmp_path.iterdir()) == []
    _, watched, *_ = warm(tmp_path)
    assert watched.steps == [1, 2, 3]


def flip_bit(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_manifest(folder):
    (folder / "manifest.json").unlink()


@each_row(
    ("damage", "words"),
    [
        (flip_bit, "model.safetensors has changed"),
        (cut_short, "model.safetensors has changed"),
        (lose_manifest, "its manifest.json cannot be read"),
    ],
)
def test_a_damaged_result_is_named_and_made_again(tmp_path, damage, words):
    folder, *_, trained = warm(tmp_path)
    damage(folder)
    told = []
    again, watched, _, loaded = warm(tmp_path, tell=told.append)
    assert (again, watched.steps) == (folder, [1, 2, 3])
    assert same(trained, loaded)
    assert len(told) == 1
    assert folder.name in told[0]
    assert words in told[0]
    assert list(tmp_path.iterdir()) == [folder]
    assert warm(tmp_path, tell=told.append)[1].steps == []
    assert len(told) == 1


MAKE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_warm_start import warm
told = []
_, watched, _, trained = warm(Path(sys.argv[1]), tell=told.append)
print(float(sum(p.double().abs().sum() for p in trained.values())))
"""


def test_runs_that_make_the_same_one_do_not_disturb_each_other(tmp_path):
    folder, *_ = warm(tmp_path)
    cut_short(folder)
    here = Path(__file__).parent
    command = [sys.executable, "-c", MAKE, str(tmp_path), str(here), str(here.parent)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = {process.communicate()[0].splitlines()[-1] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(sums) == 1
    assert list(tmp_path.iterdir()) == [folder]
    assert warm(tmp_path)[1].steps == []
