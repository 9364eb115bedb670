"""Folders of a run whose ranks see several disks, on gloo ranks that are forks of this process."""

import hashlib
from dataclasses import replace
from functools import partial

import pytest
from gloo_ranks import find, on_ranks, write
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.learner import distributed
from rlx.sealing import check_sealed_folder

APART = ("", "node-b", "node-b", "node-c")
"""The disk of each of four ranks: three nodes, one of which holds two."""


def apart(folder, ranks, what, disks):
    """Calls `what` with the folder of this rank's disk."""
    place = folder / (disks[ranks.rank] or "first")
    place.mkdir(exist_ok=True)
    return what(place, replace(ranks, disks=disks if len(set(disks)) > 1 else ()))


def on_disks(what, folder, disks=APART):
    return on_ranks(partial(apart, what=what, disks=disks), folder, count=len(disks))


def list_digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def write_files(folder, sizes):
    for number, size in enumerate(sizes):
        path = folder / f"part {number % 2}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.shake_128(bytes([number])).digest(size))


def share(folder, ranks, sizes):
    distributed.PART = 1000
    if ranks.is_first:
        write_files(folder / "sent", sizes)
    with ranks.share_folder(folder / "sent"):
        found = list_digests(folder / "sent")
        ranks.barrier()  # or the first of a disk takes the folder away from its neighbour
    ranks.barrier()
    return [found, (folder / "sent").exists()]


@settings(max_examples=5)
@given(st.lists(st.integers(0, 3500), min_size=1, max_size=4))
def test_a_shared_folder_is_equal_on_every_disk_until_the_block_ends(tmp_path_factory, sizes):
    ends = on_disks(partial(share, sizes=sizes), tmp_path_factory.mktemp("disks"))
    assert len(ends[0][0]) == len(sizes)
    assert [found for found, _ in ends] == [ends[0][0]] * 4
    assert [is_left for _, is_left in ends] == [True, False, False, False]


def share_in_turn(folder, ranks):
    if ranks.is_first:
        write_files(folder / "sent", [10])
    with ranks.share_folder(folder / "sent"):
        return len(list_digests(folder / "sent"))  # nobody waits for another


def test_no_rank_takes_a_folder_away_from_its_neighbour(tmp_path):
    assert on_disks(share_in_turn, tmp_path) == [1, 1, 1, 1]


def write_step(folder, ranks):
    saved = write(folder, 5, ranks)
    ranks.barrier()
    return [saved and saved.sha256, sorted(path.name for path in folder.iterdir())]


@pytest.fixture
def written(tmp_path):
    """A folder with disks, on the first of which is a checkpoint; what every rank saw."""
    return tmp_path, on_disks(write_step, tmp_path)


def test_a_checkpoint_of_several_disks_is_that_of_one(written, tmp_path):
    folder, ends = written
    check_sealed_folder(folder / "first" / "step_000005")
    one = on_disks(write_step, tmp_path / "one", disks=("",) * 4)
    assert ends[0] == [one[0][0], ["step_000005"]]
    assert ends[1:] == [[None, []]] * 3, "other disks keep nothing"


def test_it_is_verified_by_ranks_that_see_it(written):
    assert on_disks(find, written[0]) == [["step_000005", []]] * 4
