"""Checkpoints as files: only a sound one is taken, and whatever is wrong with another is said."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from rows import each_row

from rlx.checkpoint import (
    LATEST,
    STATE,
    RunState,
    find_checkpoint,
    find_newest_checkpoint,
    read_state,
    write_checkpoint,
)
from rlx.learner import Ranks
from rlx.sealed_folder import (
    MANIFEST,
    CheckpointError,
    check_sealed_folder,
    copy_sealed_folder,
)
from rlx.spec import RunnerSpec

STATE_OF = {
    "cursor": 40,
    "learned": 5,
    "phase": 1,
    "done": 2,
    "beta": 0.25,
    "states": {"opo": {"scale": 0.1}},
    "critic": 3,
    "ranks": 1,
    "zero_stage": 1,
    "dtype": "float32",
    "digest": "d" * 16,
}


class Engines:
    """Stands for a learner or a critic: what it writes is its own affair."""

    def __init__(self, content):
        self.content, self.engine = content, self

    def save(self, folder):
        folder.mkdir()
        (folder / "weights.pt").write_bytes(self.content)


ALONE = Ranks(0, 1, torch.device("cpu"))


def put(root, step, *, keep=2, critic=True):
    state = RunState(step=step, **STATE_OF)
    values = Engines(b"v" * 100) if critic else None
    return write_checkpoint(root, state, Engines(bytes([step]) * 1000), values, ALONE, keep=keep)


@pytest.fixture
def root(tmp_path):
    for step in (5, 10):
        put(tmp_path, step)
    return tmp_path


def told(root, recorded=None):
    said = []
    found = find_newest_checkpoint(root, recorded or {}, said.append)
    return (found and found.name), said


def test_what_was_written_is_read_again(root):
    assert told(root) == ("step_000010", [])
    assert read_state(root / "step_000010") == RunState(step=10, **STATE_OF)


def test_the_oldest_make_room(root):
    written = put(root, 15)
    assert sorted(p.name for p in root.iterdir()) == ["step_000010", "step_000015"]
    assert written.bytes > 1100
    assert len(written.sha256) == 64


def test_the_same_step_again_takes_the_place_of_the_first(root):
    first = put(root, 10).sha256
    assert put(root, 10).sha256 == first
    assert put(root, 10, critic=False).sha256 != first
    assert told(root) == ("step_000010", [])


def test_one_that_was_being_written_is_none(root):
    (root / "step_000010").rename(root / "step_000010.part")
    assert told(root) == ("step_000005", [])
    put(root, 10)
    assert told(root) == ("step_000010", [])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flip, "{} has changed"),
        (truncate, "{} has changed"),
        (Path.unlink, "{} is missing"),
        (lambda path: path.with_name("more.pt").touch(), "more.pt is no part of it"),
    ],
)
@pytest.mark.parametrize("file", ["policy/weights.pt", "critic/weights.pt", STATE])
def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_used(root, file, harm, said):
    harm(root / "step_000010" / file)
    found, (complaint,) = told(root)
    assert found == "step_000005"
    assert "step_000010" in complaint and said.format(file) in complaint


class Bomb:
    """What a pickle can do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def sealed_anew(folder):
    """Somebody writes a manifest that fits what is there."""
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    files.pop(MANIFEST)
    digests = {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in files.items()}
    (folder / MANIFEST).write_text(json.dumps(digests))


def test_a_pickle_that_was_placed_beside_is_refused_though_the_manifest_names_it(root, tmp_path):
    folder, fired = root / "step_000010", tmp_path / "fired"
    recorded = {10: put(root, 10).sha256, 5: hashed(root / "step_000005" / MANIFEST)}
    assert told(root, recorded) == ("step_000010", [])
    (folder / "policy" / "more.pt").write_bytes(pickle.dumps(Bomb(fired)))
    assert "policy/more.pt is no part of it" in told(root, recorded)[1][0]
    sealed_anew(folder)
    assert told(root) == ("step_000010", []), "it does name it"
    found, (said,) = told(root, recorded)
    assert found == "step_000005"
    assert f"its {MANIFEST} is not the recorded one" in said
    assert not fired.exists()


def hashed(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["../outside.pt", "policy/../../outside.pt", "/outside.pt"])
def test_a_manifest_that_points_elsewhere_is_refused_and_nothing_there_is_read(root, name):
    outside, folder = root / "outside.pt", root / "step_000010"
    os.mkfifo(outside)  # whoever reads it waits for ever
    manifest = json.loads((folder / MANIFEST).read_text())
    if name.startswith("/"):
        name = str(outside)
    (folder / MANIFEST).write_text(json.dumps({**manifest, name: "0" * 64}))
    found, (said,) = told(root)
    assert found == "step_000005"
    assert f"{name} is missing" in said


@pytest.mark.parametrize("at", [".", "policy", "policy/weights.pt", STATE])
def test_links_are_refused(root, tmp_path, at):
    place, elsewhere = root / "step_000010" / at, tmp_path / "elsewhere"
    shutil.move(place, elsewhere)
    place.symlink_to(elsewhere)
    found, (said,) = told(root)
    assert found == "step_000005"
    assert f"{'it' if at == '.' else at} is a symbolic link" in said
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        copy_sealed_folder(root / "step_000010", tmp_path / "copy")


@pytest.mark.parametrize(
    "content", ["", "{", json.dumps({}), json.dumps([STATE]), json.dumps({STATE: None}), "\xff"]
)
def test_a_manifest_that_says_nothing_is_refused(root, content):
    (root / "step_000010" / MANIFEST).write_text(content, encoding="latin-1")
    found, said = told(root)
    assert (found, len(said)) == ("step_000005", 1)


def test_where_none_is_sound_there_is_none(root):
    for folder in root.iterdir():
        flip(folder / STATE)
    found, said = told(root)
    assert found is None
    assert len(said) == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_a_refused_one_of_a_later_step_makes_room_for_the_new_one(root, keep):
    for folder in root.iterdir():
        flip(folder / STATE)
    put(root, 3, keep=keep)
    assert told(root) == ("step_000003", [])


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "rlx.sealed_folder.sync_to_disk", lambda path: synced.append(Path(path).name)
    )
    put(tmp_path, 5)
    folders = ["step_000005.part-0", "policy", "critic", tmp_path.name]
    assert set(synced) == {*folders, "weights.pt", STATE, MANIFEST}
    assert synced.count("weights.pt") == 4, "by the rank that wrote it, and by rank 0"
    assert synced[-1] == tmp_path.name


def test_one_is_named_by_its_step_or_as_the_newest(root):
    assert find_checkpoint(root, "5", {}).name == "step_000005"
    assert find_checkpoint(root, LATEST, {}).name == "step_000010"
    for step in ("7", "x", "-5", "5.0", "⁵"):
        with pytest.raises(CheckpointError, match=f"no checkpoint of step {step}; .* steps: 5, 10"):
            find_checkpoint(root, step, {})
    flip(root / "step_000010" / STATE)
    assert find_checkpoint(root, LATEST, {}).name == "step_000005"
    with pytest.raises(CheckpointError, match=r"step_000010 is damaged: state\.json has changed"):
        find_checkpoint(root, "10", {})
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        find_checkpoint(root / "nowhere", LATEST, {})


def test_a_copy_shares_the_disk_and_outlives_its_source(root, tmp_path):
    source, target = root / "step_000010", tmp_path / "origin" / "step_000010"
    target.parent.mkdir()
    copy_sealed_folder(source, target, hashed(source / MANIFEST))
    weights = "policy/weights.pt"
    assert (source / weights).samefile(target / weights)
    shutil.rmtree(source)
    check_sealed_folder(target)
    assert [p.name for p in target.parent.iterdir()] == ["step_000010"]
    with pytest.raises(CheckpointError, match="could not be copied"):
        copy_sealed_folder(source, tmp_path / "again")
    with pytest.raises(CheckpointError, match="not the recorded one"):
        copy_sealed_folder(target, tmp_path / "again", "0" * 64)
    assert not (tmp_path / "again").exists()


def test_a_copy_on_another_disk_is_a_copy(root):
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == root.stat().st_dev:
        pytest.skip("there is no other disk here")
    target = shm / f"rlx-test-{os.getpid()}"
    try:
        copy_sealed_folder(root / "step_000010", target)
        check_sealed_folder(target)
        assert not (target / STATE).samefile(root / "step_000010" / STATE)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def test_one_of_another_version_is_refused_by_its_version(root):
    state = root / "step_000010" / STATE
    said = {**json.loads(state.read_text()), "version": "0.0.1"}
    del said["zero_stage"]
    state.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"was written by rlx 0\.0\.1"):
        read_state(root / "step_000010")


@each_row(
    ("ranks", "stage", "converted"),
    [(1, 1, False), (2, 1, True), (1, 2, True), (1, 3, True), (2, 3, True)],
)
def test_other_ranks_or_another_stage_need_a_conversion(ranks, stage, converted):
    state = RunState(step=1, **STATE_OF)
    runner = RunnerSpec(zero_stage=stage)
    assert state.find_load_conflict(runner) is None
    assert state.needs_conversion(ranks, runner) is converted


def test_stage_0_is_spread_over_nobody_and_another_precision_is_another_run():
    whole = RunState(step=1, **{**STATE_OF, "zero_stage": 0})
    assert not whole.needs_conversion(8, RunnerSpec(zero_stage=0))
    assert whole.find_load_conflict(RunnerSpec(zero_stage=0)) is None
    assert whole.find_load_conflict(RunnerSpec(zero_stage=1))[0] == "zero_stage"
    assert whole.find_load_conflict(RunnerSpec(zero_stage=0, dtype="bfloat16"))[0] == "dtype"
