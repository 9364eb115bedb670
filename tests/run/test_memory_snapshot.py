"""What a rank writes when its GPU is out of memory."""

import pickle

import torch
from rows import each_row

from rlx.home import RunFolder
from rlx.launch import rank

SNAPSHOT = {"segments": []}


@each_row(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        ValueError("no"),
    ],
)
def test_a_rank_that_runs_out_of_memory_writes_what_held_it(tmp_path, monkeypatch, capsys, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(rank.faulthandler, "register", lambda _: None)  # pytest captures stderr
    monkeypatch.setenv("RLX_SUPERVISOR", "1")
    monkeypatch.setattr(rank, "_run_rank", fail)
    monkeypatch.setattr(rank, "_exit_without_supervisor", lambda *_: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: SNAPSHOT)
    assert rank.main(str(tmp_path), "r-0001") == 1
    folder = RunFolder(tmp_path)
    assert folder.failure.exists()
    assert folder.memory_snapshot.exists() == (not isinstance(error, ValueError))
    if folder.memory_snapshot.exists():
        assert pickle.loads(folder.memory_snapshot.read_bytes()) == SNAPSHOT
        assert str(folder.memory_snapshot) in capsys.readouterr().err
