"""Checkpoints of several ranks, gloo ranks that are forks of this process."""

import json
import multiprocessing
import os
import signal
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlx import checkpoint, sealed_folder
from rlx.checkpoint import RunState, find_newest_checkpoint, write_checkpoint
from rlx.learner import Ranks
from rlx.run import loop
from rlx.sealed_folder import (
    MANIFEST,
    CheckpointError,
    check_sealed_folder,
    compute_manifest_digest,
)

STATE_OF = {
    "cursor": 40,
    "learned": 5,
    "phase": 1,
    "done": 2,
    "beta": None,
    "states": {},
    "critic": 0,
    "ranks": 2,
    "zero_stage": 2,
    "dtype": "float32",
    "digest": "d" * 16,
}
WEIGHTS = "mp_rank_00_model_states.pt"
PATIENCE = timedelta(minutes=10)


class Engine:
    """Writes files under DeepSpeed's names: rank 0 the weights, every rank its moments."""

    def __init__(self, ranks, step):
        self.ranks, self.step = ranks, step

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        if self.ranks.is_first:
            (folder / WEIGHTS).write_bytes(bytes([self.step]) * 1000)
        moments = f"bf16_zero_pp_rank_{self.ranks.rank}_mp_rank_00_optim_states.pt"
        (folder / moments).write_bytes(bytes([self.ranks.rank]) * 500)


def write(root, step, ranks):
    """Writes a checkpoint of a learner and a critic."""
    state, learner = RunState(step=step, **STATE_OF), SimpleNamespace(engine=Engine(ranks, step))
    return write_checkpoint(root, state, learner, learner, ranks, keep=2)


def work(what, folder, rank, count):
    dist.distributed_c10d._update_default_pg(None)  # what this fork has of its parent's group
    store = dist.FileStore(str(folder / "meeting"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
    try:
        done = what(folder, Ranks(rank, count, torch.device("cpu")))
    except CheckpointError as error:
        done = f"CheckpointError: {error}"
    (folder / f"done-{rank}.json").write_text(json.dumps(done))
    dist.barrier()
    os._exit(0)  # what pytest registered for its own end is not for its copies


def on_ranks(what, folder, count=2):
    """Calls `what` on every rank; returns what each has returned, None where it was killed."""
    folder.mkdir(exist_ok=True)
    for left in (*folder.glob("done-*"), *folder.glob("meeting")):
        left.unlink()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(what, folder, r, count)) for r in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    files = [folder / f"done-{rank}.json" for rank in range(count)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def find(root):
    """The name of the newest checkpoint."""
    return find_newest_checkpoint(root, {}, print).name


def write_two(folder, ranks):
    for step in (5, 10):
        write(folder, step, ranks)


@pytest.fixture
def root(tmp_path):
    on_ranks(write_two, tmp_path / "root")
    return tmp_path / "root"


def moments(part, rank):
    return f"{part}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def test_the_manifest_is_the_one_that_a_single_process_writes(root):
    sealed = root / "step_000010"
    check_sealed_folder(sealed)
    digest, content = compute_manifest_digest(sealed), (sealed / MANIFEST).read_bytes()
    assert len(json.loads(content)) == 7
    (sealed / MANIFEST).unlink()
    sealed_folder.write_manifest(sealed)
    assert (sealed / MANIFEST).read_bytes() == content
    assert compute_manifest_digest(sealed) == digest


def resume(folder, ranks, refused):
    """Every rank resumes from what rank 0 finds, or ends with why it finds nothing."""

    def find_or_refuse(context):
        assert context.ranks.is_first
        if refused:
            raise CheckpointError("it is damaged")
        return folder.relative_to(folder.parent) / "step_000010"

    loop._find_resume_checkpoint = find_or_refuse
    loop._resume_from = lambda context, place: str(place.relative_to(folder))
    files = SimpleNamespace(root=folder.parent)
    return loop.resume_run(SimpleNamespace(ranks=ranks, folder=files))


@pytest.mark.parametrize("refused", [False, True])
def test_every_rank_resumes_as_the_first_one_says(root, refused):
    said = "CheckpointError: it is damaged" if refused else "step_000010"
    assert on_ranks(partial(resume, refused=refused), root) == [said] * 2


def list_late(folder, ranks):
    """Rank 0 is shown an older listing of a network disk, without what the other has written."""
    plain = sealed_folder.list_files
    if ranks.is_first:
        for module in (checkpoint, sealed_folder):
            module.list_files = lambda at: [n for n in plain(at) if n != moments("policy", 1)]
    return bool(write(folder, 15, ranks))


def test_a_listing_that_comes_late_leaves_no_file_out(root):
    assert on_ranks(list_late, root)[0]
    assert find(root) == "step_000015"
    assert moments("policy", 1) in json.loads((root / "step_000015" / MANIFEST).read_text())


def vanish(folder, ranks):
    """Rank 0 does not have what the other has written."""
    plain = checkpoint.write_canonical_json

    def write_without(path, content):
        (path.parent / moments("policy", 1)).unlink()
        plain(path, content)

    checkpoint.write_canonical_json = write_without
    return write(folder, 15, ranks)


def test_a_file_that_rank_0_does_not_have_is_no_part_of_a_checkpoint(root):
    first, _ = on_ranks(vanish, root)
    assert first.startswith(f"CheckpointError: {moments('policy', 1)} was written by another rank")
    assert not (root / "step_000015").exists()
    assert find(root) == "step_000010"


def die(folder, ranks, mortal):
    def kill(_):
        os.kill(os.getpid(), signal.SIGKILL)

    if ranks.rank == mortal:
        checkpoint.list_files = kill
    return write(folder, 15, ranks)


@pytest.mark.parametrize("mortal", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(root, mortal):
    on_ranks(partial(die, mortal=mortal), root)
    assert (root / "step_000015.part-0").is_dir()
    assert find(root) == "step_000010"
    on_ranks(lambda folder, ranks: bool(write(folder, 15, ranks)), root)
    assert find(root) == "step_000015"
    assert not list(root.glob("*.part-*"))
