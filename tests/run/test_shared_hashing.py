"""Checkpoints hashed by every rank for its part, on gloo ranks that are forks of this process."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from gloo_ranks import WEIGHTS, find, on_ranks, write

from rlx import checkpoint, sealed_folder
from rlx.sealed_folder import (
    MANIFEST,
    CheckpointError,
    check_sealed_folder,
    compute_manifest_digest,
)


def hash_and_note(folder, ranks, do):
    """The files that this rank hashes while something is done, by name."""
    hashed, plain = [], sealed_folder._compute_sha256

    def note(path):
        hashed.append(str(Path(path).relative_to(Path(path).parents[1])))
        return plain(path)

    sealed_folder._compute_sha256 = note
    do(folder, ranks)
    return sorted(hashed)


def write_two(folder, ranks):
    for step in (5, 10):
        write(folder, step, ranks)


@pytest.fixture
def root(tmp_path):
    on_ranks(write_two, tmp_path / "root")
    return tmp_path / "root"


def moments(part, rank):
    return f"{part}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def test_every_rank_hashes_what_it_has_written(tmp_path):
    note = partial(hash_and_note, do=partial(lambda f, r, step: write(f, step, r), step=5))
    first, second = on_ranks(note, tmp_path / "root")
    own = [*(f"{part}/{WEIGHTS}" for part in ("critic", "policy"))]
    own += [moments(part, 0) for part in ("critic", "policy")]
    assert [name for name in first if name.startswith(("policy", "critic"))] == sorted(own)
    assert second == [moments(part, 1) for part in ("critic", "policy")]


def test_the_manifest_is_the_one_that_a_single_rank_writes(root):
    sealed = root / "step_000010"
    check_sealed_folder(sealed)
    digest, content = compute_manifest_digest(sealed), (sealed / MANIFEST).read_bytes()
    assert len(json.loads(content)) == 7
    (sealed / MANIFEST).unlink()
    sealed_folder.write_manifest(sealed)
    assert (sealed / MANIFEST).read_bytes() == content
    assert compute_manifest_digest(sealed) == digest


def test_every_rank_verifies_its_part_and_all_go_on_from_the_same(root):
    assert on_ranks(find, root) == [["step_000010", []], ["step_000010", []]]
    first, second = on_ranks(partial(hash_and_note, do=find), root)
    assert second == [moments(part, 1) for part in ("critic", "policy")]
    assert moments("policy", 0) in first and moments("policy", 1) not in first


@pytest.mark.parametrize("name", [moments("policy", 1), moments("critic", 0), f"policy/{WEIGHTS}"])
def test_a_file_that_any_rank_finds_damaged_is_named(root, name):
    file = root / "step_000010" / name
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    first, second = on_ranks(find, root)
    why = f"checkpoint step_000010 is not used: {name} has changed since it was written"
    assert first == ["step_000005", [why]]
    assert second == ["step_000005", []]


def test_another_number_of_ranks_verifies_every_file(root):
    alone, *_ = on_ranks(partial(hash_and_note, do=find), root, count=1)
    shares = on_ranks(partial(hash_and_note, do=find), root, count=3)
    assert sorted(name for share in shares for name in share) == alone


def refuse(folder, ranks):
    def find_nothing(compute):
        compute([folder / "step_000010" / "policy" / WEIGHTS])
        raise CheckpointError("it is damaged")

    return checkpoint.find_by_shared_hashing(find_nothing, ranks)


def test_what_the_first_rank_refuses_ends_all(root):
    assert on_ranks(refuse, root) == ["CheckpointError: it is damaged"] * 2


def list_late(folder, ranks):
    """Rank 0 is shown an older listing of a network disk, without what the other has written."""
    plain = sealed_folder.list_files
    if ranks.is_first:
        sealed_folder.list_files = lambda at: [n for n in plain(at) if n != moments("policy", 1)]
    return bool(write(folder, 15, ranks))


def test_a_listing_that_comes_late_leaves_no_file_out(root):
    assert on_ranks(list_late, root)[0]
    assert on_ranks(find, root)[0] == ["step_000015", []]


def vanish(folder, ranks):
    """Rank 0 does not have what the other has written."""
    plain = sealed_folder.list_files

    def list_without(at):
        (at / moments("policy", 1)).unlink()
        return plain(at)

    if ranks.is_first:
        sealed_folder.list_files = list_without
    return write(folder, 15, ranks)


def test_a_file_that_rank_0_does_not_have_is_no_part_of_a_checkpoint(root):
    first, _ = on_ranks(vanish, root)
    assert first.startswith(f"CheckpointError: {moments('policy', 1)} was written by another rank")
    assert not (root / "step_000015").exists()
    assert on_ranks(find, root)[0] == ["step_000010", []]


def break_reading(folder, ranks):
    if ranks.rank == 1:
        plain = checkpoint.compute_digests

        def compute(files):
            list(map(Path.unlink, files))
            return plain(files)

        checkpoint.compute_digests = compute
    return write(folder, 15, ranks)


def test_what_one_rank_cannot_read_ends_all(root):
    ends = on_ranks(break_reading, root)
    assert all("cannot be read: No such file" in end for end in ends)
    assert on_ranks(find, root)[0] == ["step_000010", []]


def die(folder, ranks, mortal):
    def kill(_):
        os.kill(os.getpid(), signal.SIGKILL)

    if ranks.rank == mortal:
        checkpoint.compute_digests = kill
    return write(folder, 15, ranks)


@pytest.mark.parametrize("mortal", [0, 1])
def test_a_rank_that_is_killed_while_it_hashes_leaves_the_checkpoint_before(root, mortal):
    on_ranks(partial(die, mortal=mortal), root)
    assert (root / "step_000015.part-0").is_dir()
    assert on_ranks(find, root) == [["step_000010", []], ["step_000010", []]]
    on_ranks(lambda folder, ranks: bool(write(folder, 15, ranks)), root)
    assert on_ranks(find, root)[1] == ["step_000015", []]
    assert not list(root.glob("*.part-*"))
