"""Weights from a rank to a thread that plays its worker."""

import threading
from multiprocessing import Pipe

import torch
from rows import each_row

from rlx.sampler.vllm_engine import WeightFile, collect_weights, drop_tied_weights
from rlx.sampler.vllm_process import read_weights


@each_row("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_as_they_were_published_and_leave_no_file(dtype, tmp_path):
    """Twice, as where a worker is replaced, although the learner goes on meanwhile."""
    matrix = torch.arange(12.0).reshape(3, 4)
    turned, scale = torch.rand(5, 2).T, torch.rand(())
    weights = {"a": matrix, "tied": matrix, "turned": turned, "scale": scale}
    before = {name: weight.clone() for name, weight in weights.items()}
    ours, theirs = Pipe()
    arrived = []

    def receive():
        for _ in range(2):
            arrived.append({name: weight.clone() for name, weight in read_weights(theirs)})

    worker = threading.Thread(target=receive)
    worker.start()
    kept = collect_weights(drop_tied_weights(weights).items(), dtype)
    published = WeightFile(kept, (tmp_path / "disk", tmp_path / "memory"))
    for weight in weights.values():
        weight.mul_(-1)
    for _ in range(2):
        published.send(ours)
    worker.join()
    published.close()
    for found in arrived:
        assert set(found) == {"a", "turned", "scale"}
        for name, weight in found.items():
            torch.testing.assert_close(weight, before[name].to(dtype), rtol=0, atol=0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
