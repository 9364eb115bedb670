"""Ways of weights, from one process to a thread that plays the worker."""

import inspect
import subprocess
import sys
import threading
from multiprocessing import Pipe

import pytest
import torch
from patience import LIMIT
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rlx.sampler.channel import Channel
from rlx.sampler.transfer import (
    DEVICE,
    collect_weights,
    drop_tied_weights,
    join_process_group,
    publish_weights,
    receive_weights,
)

CPU = torch.device("cpu")
WAYS = ("file", "ipc", "nccl")


@pytest.fixture
def weights():
    matrix = torch.arange(12.0).reshape(3, 4)
    return {"a": matrix, "tied": matrix, "turned": torch.rand(5, 2).T, "scale": torch.rand(())}


def carried(way, weights, tmp_path, dtype=torch.float32, spoil=lambda: None, times=1):
    """What arrives, when the rank's weights are spoiled after they were published."""
    ours, theirs = map(Channel, Pipe())
    arrived = []

    def work():
        group = join_process_group(tmp_path / "meeting", 1, CPU) if way == "nccl" else None
        for _ in range(times):
            message = theirs.receive()
            found = receive_weights(message, theirs, CPU, group)
            arrived.append({name: weight.clone() for name, weight in found})

    worker = threading.Thread(target=work)
    worker.start()
    group = join_process_group(tmp_path / "meeting", 0, CPU) if way == "nccl" else None
    kept = collect_weights(way, drop_tied_weights(weights).items(), dtype, CPU)
    published = publish_weights(way, kept, (tmp_path / "disk", tmp_path / "memory"))
    spoil()
    for _ in range(times):
        ours.send(published.message)
        published.send(ours, group)
    worker.join(30)
    published.close()
    return arrived


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_weights_arrive_as_they_were_published(way, dtype, weights, tmp_path):
    before = {name: weight.clone() for name, weight in weights.items()}

    def spoil():
        for weight in weights.values():
            weight.mul_(-1)

    arrived = carried(way, weights, tmp_path, dtype, spoil, times=2)
    assert len(arrived) == 2
    for found in arrived:
        assert set(found) == {"a", "turned", "scale"}
        for name, weight in found.items():
            torch.testing.assert_close(weight, before[name].to(dtype), rtol=0, atol=0)


def test_a_file_leaves_nothing(weights, tmp_path):
    carried("file", weights, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_broadcast_ends_with_the_worker(tmp_path):
    ours, theirs = map(Channel, Pipe())
    leaving = "import os, sys; from pathlib import Path; "
    leaving += "from rlx.sampler.transfer import join_process_group; "
    leaving += (
        # Kept, or its connections would be closed while the other side is still opening them.
        "import torch; kept = join_process_group(Path(sys.argv[1]), 1, torch.device('cpu')); "
        "sys.stdin.read(); os._exit(0)"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", leaving, str(tmp_path / "meeting")], stdin=subprocess.PIPE
    )
    group = join_process_group(tmp_path / "meeting", 0, CPU)
    worker.communicate(timeout=LIMIT)  # it leaves when both have met
    assert worker.returncode == 0
    large = {"a": torch.ones(4_000_000)}
    published = publish_weights("nccl", large, (tmp_path, tmp_path))
    theirs.close()
    published.send(ours, group)  # nobody receives it
    with pytest.raises((EOFError, OSError)):
        ours.receive()


def test_a_gpu_is_renumbered_where_torch_has_its_number():
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[DEVICE] == "storage_device"
