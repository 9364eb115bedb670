"""Runs whose GPU has no free memory: which are tried again, and with what."""

import pytest

GREEDY = """
import json
from pathlib import Path

import torch

from rlx.plugin import Mask

class Greedy(Mask):
    implementation = "rlx_greedy:select"
    place: str = ""
    room: int = 0

def select(batch, options):
    spec = json.loads(next(Path(options.place).glob("runs/*/spec.json")).read_text())
    tokens = spec["runner"]["micro_batch_tokens"]
    if tokens > options.room:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tokens}.00 GiB")
    return batch.is_own.clone()
"""


@pytest.mark.parametrize(("room", "status"), [(1024, "finished"), (1023, "failed")])
def test_a_gpu_without_memory_for_a_micro_batch_is_asked_once_for_half_of_it(own, room, status):
    own.offer("[rlx.masks]\ngreedy = rlx_greedy:Greedy\n", rlx_greedy=GREEDY)
    mask = f"{{strategy: greedy, place: {own.path}, room: {room}}}"
    sets = {**own.small, "mask": mask, "runner.micro_batch_tokens": 2048}
    done = own.rlx("submit", own.yaml, "-q", sets=sets)
    record = own.run("r-0001")
    assert (record.status, record.attempt) == (status, 2), done.stderr
    with own.registry() as registry:
        (event,) = [e for e in registry.results.events("r-0001") if e.kind == "smaller_batches"]
    assert event.payload["tokens"] == 1024
    if status == "failed":
        assert done.returncode == 4
        assert "the GPU ran out of memory" in record.reason


LEAKY = """
import os
from itertools import count

import torch

from rlx.plugin import Mask

class Leaky(Mask):
    implementation = "sampler.rlx_leaky:select"
    steps: list[int] = []

calls = count()

def select(batch, options):
    attempt = int(os.environ.get("RLX_RUN_ATTEMPT", 0))
    if attempt and next(calls) == options.steps[attempt - 1]:
        raise torch.AcceleratorError("CUDA error: out of memory")
    return batch.is_own.clone()
"""


@pytest.mark.parametrize(
    ("steps", "status"),
    [([3, 2, 9], "finished"), ([3, 0], "failed"), ([1], "failed")],
    ids=["later", "at the same place", "before a checkpoint"],
)
def test_a_sampler_without_memory_goes_on_after_a_newer_checkpoint(own, steps, status):
    """A new process has no fragments. The plugin fails in a frame of a folder `sampler`, after as
    many steps of each attempt as it is told."""
    own.offer("[rlx.masks]\nleaky = sampler.rlx_leaky:Leaky\n")
    package = own.folder / "guest" / "sampler"
    package.mkdir()
    (package / "rlx_leaky.py").write_text(LEAKY)
    sets = {
        **own.small,
        "mask": f"{{strategy: leaky, steps: {steps}}}",
        "phases.0.steps": 5,
        "runner.checkpoint.every": 2,
    }
    done = own.rlx("submit", own.yaml, "-q", sets=sets)
    record = own.run("r-0001")
    assert (record.status, record.attempt) == (status, len(steps)), done.stderr
    with own.registry() as registry:
        events = registry.results.events("r-0001")
    failures = [e.message for e in events if e.kind == "attempt_failed"]
    assert len(failures) == len(steps) - 1
    assert all("ran out of memory while it sampled" in text for text in failures)
    assert not any(e.kind == "smaller_batches" for e in events)
    assert done.returncode == (0 if status == "finished" else 4)
