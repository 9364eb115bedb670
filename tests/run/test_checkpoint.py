"""Checkpoints as files: only a sound one is taken, and whatever is wrong with another is said."""

import json

import pytest

from rlx.run.checkpoint import MANIFEST, STATE, RunState, newest, read_state, write

STATE_OF = {
    "cursor": 40,
    "learned": 5,
    "phase": 1,
    "done": 2,
    "beta": 0.25,
    "states": {"opo": {"scale": 0.1}},
    "critic": 3,
    "ranks": 1,
    "digest": "d" * 16,
}


class Engines:
    """Stands for a learner or a critic: what it writes is its own affair."""

    def __init__(self, content):
        self.content = content

    def save(self, folder):
        folder.mkdir()
        (folder / "weights.pt").write_bytes(self.content)


class One:
    rank, count, is_first = 0, 1, True

    def barrier(self):
        pass


def put(root, step, *, keep=2, critic=True):
    state = RunState(step=step, **STATE_OF)
    values = Engines(b"v" * 100) if critic else None
    return write(root, state, Engines(bytes([step]) * 1000), values, One(), keep=keep)


@pytest.fixture
def root(tmp_path):
    for step in (5, 10):
        put(tmp_path, step)
    return tmp_path


def told(root):
    said = []
    found = newest(root, said.append)
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


def test_without_any_there_is_none(tmp_path):
    assert told(tmp_path) == (None, [])
    assert told(tmp_path / "nowhere") == (None, [])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, truncate])
@pytest.mark.parametrize("file", ["policy/weights.pt", "critic/weights.pt", STATE])
def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_used(root, file, harm):
    harm(root / "step_000010" / file)
    found, (said,) = told(root)
    assert found == "step_000005"
    assert "step_000010" in said and f"{file} has changed" in said


def test_a_missing_or_a_strange_file_is_refused(root):
    (root / "step_000010" / "policy" / "weights.pt").unlink()
    assert "policy/weights.pt is missing" in told(root)[1][0]
    put(root, 10)
    (root / "step_000010" / "more.pt").write_text("")
    assert "more.pt is no part of it" in told(root)[1][0]


@pytest.mark.parametrize("content", ["", "{", json.dumps({})])
def test_a_manifest_that_says_nothing_is_refused(root, content):
    (root / "step_000010" / MANIFEST).write_text(content)
    found, said = told(root)
    assert (found, len(said)) == ("step_000005", 1)


def test_where_none_is_sound_there_is_none(root):
    for folder in root.iterdir():
        flip(folder / STATE)
    found, said = told(root)
    assert found is None
    assert len(said) == 2
