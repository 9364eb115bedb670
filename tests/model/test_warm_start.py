"""Warm starts: trained once, kept by everything that decides them, never kept by halves."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rows import each_row
from transformers import PreTrainedModel

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


def warm(cache, *overrides, tell=lambda _: None):
    """The folder, the steps that were trained, and the weights before and after."""
    spec = read_spec(RLCR, [*SMALL, *overrides]).spec
    policy = build_policy(spec.model, spec.seed)
    fresh = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    trained_steps = []

    def note(step, steps, loss):
        assert steps == 3
        trained_steps.append(step)

    folder = warm_start_policy(policy, spec, build_setup(spec).task, cache, note, tell=tell)
    trained = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    assert all(p.grad is None for p in policy.model.parameters()), "training begins with none"
    return folder, trained_steps, fresh, trained


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_it_is_trained_once_and_then_loaded(tmp_path):
    folder, steps, fresh, trained = warm(tmp_path)
    assert steps == [1, 2, 3]
    assert not same(fresh, trained)
    assert folder.parent == tmp_path
    again, unasked, _, loaded = warm(tmp_path)
    assert (again, unasked) == (folder, [])
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
    folder, steps, _, loaded = warm(tmp_path / "cache")
    assert steps == [] and same(trained, loaded)
    assert folder.parent == tmp_path / "cache"
    assert len(read_warm_start_losses(folder)) == 3
    _, others, *_ = warm(tmp_path / "cache", "seed=1")
    assert others == [1, 2, 3]


def test_a_shipped_result_of_other_demonstrations_is_not_taken(tmp_path, shipped):
    target, _ = shipped
    (target / ORIGIN).write_text(json.dumps({"demonstrations": "of another version"}))
    for complaint in (f"{ORIGIN} has changed", "it learned other demonstrations"):
        said = []
        _, steps, *_ = warm(tmp_path / complaint[:2], tell=said.append)
        assert steps == [1, 2, 3]
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
    other, steps, *_ = warm(tmp_path, change)
    assert other != folder
    assert steps == [1, 2, 3]


def test_breaking_off_while_saving_leaves_no_half_result(tmp_path, monkeypatch):
    def disk_full(self, folder, **_):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="No space left"):
        broken.setattr(PreTrainedModel, "save_pretrained", disk_full)
        warm(tmp_path)
    assert list(tmp_path.iterdir()) == []
    _, steps, *_ = warm(tmp_path)
    assert steps == [1, 2, 3]


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def test_a_damaged_result_is_named_and_made_again(tmp_path):
    folder, *_, trained = warm(tmp_path)
    cut_short(folder)
    told = []
    again, steps, _, loaded = warm(tmp_path, tell=told.append)
    assert (again, steps) == (folder, [1, 2, 3])
    assert same(trained, loaded)
    assert len(told) == 1
    assert folder.name in told[0]
    assert "model.safetensors has changed" in told[0]
    assert list(tmp_path.iterdir()) == [folder]
    assert warm(tmp_path, tell=told.append)[1] == []
    assert len(told) == 1


def test_a_run_that_another_overtakes_twice_leaves_the_other_s_result(tmp_path, monkeypatch):
    """While it puts the damaged one aside, and while it saves its own."""
    folder, *_, trained = warm(tmp_path)
    cut_short(folder)
    save, others = PreTrainedModel.save_pretrained, []

    def save_late(model, place, **options):
        save(model, place, **options)
        if not others:
            others.append(None)  # which is not overtaken itself
            others[0] = warm(tmp_path)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_late)
    again, steps, _, mine = warm(tmp_path, tell=lambda _: shutil.rmtree(folder))
    other, theirs_steps, _, theirs = others[0]
    assert (again, steps) == (other, theirs_steps) == (folder, [1, 2, 3])
    assert same(mine, trained) and same(theirs, trained)
    assert list(tmp_path.iterdir()) == [folder]
    assert warm(tmp_path)[1] == []
