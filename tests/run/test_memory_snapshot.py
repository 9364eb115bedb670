"""What a rank writes when its GPU is out of memory, and what the check makes of it."""

import pickle
import sys
from pathlib import Path

import torch
from rows import each_row

from rlx.home import RunFolder
from rlx.launch import rank

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from follow import summarize_snapshot

LINE = {"filename": "/home/me/rlx/learner/forward.py", "line": 7, "name": "forward"}
INSIDE = {"filename": "/usr/lib/python3/site-packages/torch/nn/linear.py", "line": 1, "name": "f"}
GIB = 1 << 30
SNAPSHOT = {
    "segments": [
        {
            "total_size": 4 * GIB,
            "blocks": [
                {"size": 2 * GIB, "state": "active_allocated", "frames": [INSIDE, LINE]},
                {"size": 1 * GIB, "state": "active_allocated", "frames": [LINE]},
                {"size": 1 * GIB, "state": "inactive", "frames": []},
            ],
        },
        {
            "total_size": GIB // 2,
            "blocks": [{"size": GIB // 2, "state": "active_awaiting_free", "frames": []}],
        },
    ]
}


def test_a_snapshot_says_which_lines_hold_memory():
    assert summarize_snapshot(SNAPSHOT) == {
        "allocated_gib": 3.5,
        "reserved_gib": 4.5,
        "largest_free_gib": 1.0,
        "by_line": [
            {"line": "learner/forward.py:7 forward", "gib": 3.0, "blocks": 2},
            {"line": "unknown", "gib": 0.5, "blocks": 1},
        ],
    }


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
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
    assert rank.main(str(tmp_path), "r-0001") == 1
    folder = RunFolder(tmp_path)
    assert folder.failure.exists()
    assert folder.memory_snapshot.exists() == (not isinstance(error, ValueError))
    if folder.memory_snapshot.exists():
        assert pickle.loads(folder.memory_snapshot.read_bytes()) == SNAPSHOT
        assert str(folder.memory_snapshot) in capsys.readouterr().err
