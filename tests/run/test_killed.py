"""What is left of a run when one of its processes is killed: the truth, and no orphans."""

import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_a_killed_rank_and_a_killed_supervisor(home, finished):
    long = {**home.small, "tracking.mlflow": "null", "phases.0.steps": 100_000}
    runs = {}
    for name in ("no-rank", "no-supervisor"):
        done = home.rlx("submit", home.yaml, "-qd", sets={**long, "name": name, "seed": len(runs)})
        runs[name] = done.stdout.strip()
    for run_id in runs.values():
        home.until(lambda run_id=run_id: home.run(run_id).step > 1, f"{run_id} to train")

    supervisor = home.run(runs["no-supervisor"]).pid
    os.kill(supervisor, signal.SIGKILL)
    folder = home.run(runs["no-rank"]).directory.encode()
    rank = next(
        pid
        for pid in home.processes()
        if b"rlx.run.rank" in command(pid)
        and b"torch.distributed.run" not in command(pid)
        and folder in command(pid)
    )
    os.kill(rank, signal.SIGKILL)

    home.until(lambda: home.run(runs["no-rank"]).status == "failed", "the failure to be recorded")
    assert "killed by signal 9 (SIGKILL" in home.run(runs["no-rank"]).reason
    home.until(lambda: not home.processes(), "every process to end")
