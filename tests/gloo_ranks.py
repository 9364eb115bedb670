"""Ranks of a process group that are forks of the tests, and what stands for engines there."""

import json
import multiprocessing
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from rlx.checkpoint import (
    RunState,
    find_by_shared_hashing,
    find_newest_checkpoint,
    write_checkpoint,
)
from rlx.learner import Ranks
from rlx.sealed_folder import CheckpointError

__all__ = ["WEIGHTS", "find", "on_ranks", "write"]

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


class Engines:
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
    """Writes a checkpoint of two engines."""
    state, engine = RunState(step=step, **STATE_OF), Engines(ranks, step)
    return write_checkpoint(root, state, engine, engine, ranks, keep=2)


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


def find(folder, ranks):
    """The name of the newest checkpoint, as all ranks find it, and what was said."""
    said = []

    def find_here(compute):
        return find_newest_checkpoint(folder, {}, said.append, compute)

    found = find_by_shared_hashing(find_here, ranks)
    return [found and found.name, said]
