"""What is left of a run when one of its processes is killed: the truth, and no orphans."""

import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

from patience import ForwardClock


def temporary_folder(rank):
    """The folder for temporary files of a rank; None if the rank has ended."""
    try:
        variables = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
    except OSError:
        return None
    folder = dict(v.split("=", 1) for v in variables if v).get("TMPDIR")
    return None if folder is None else Path(folder)


def test_a_killed_rank_a_killed_supervisor_and_a_killed_peer(home):
    long = {**home.long, "runner.max_attempts": 1}
    runs = {}

    def submit(name, seed, ranks=1):
        sets = {**long, "name": name, "seed": seed, "runner.ranks": ranks}
        return home.submit("-d", sets=sets)

    for seed, name in enumerate(("no-rank", "no-supervisor")):
        runs[name] = submit(name, seed)
    runs["no-peer"] = submit("no-peer", 2, ranks=2)
    for run_id in runs.values():
        home.until(lambda run_id=run_id: home.run(run_id).step > 1, f"{run_id} to train")

    folders = {temporary_folder(pid) for run_id in runs.values() for pid in home.ranks(run_id)}
    assert len(folders) == len(runs)
    assert all(folder.is_dir() for folder in folders)

    supervisor = home.run(runs["no-supervisor"]).pid
    os.kill(supervisor, signal.SIGKILL)
    (rank,), (_, peer) = home.ranks(runs["no-rank"]), home.ranks(runs["no-peer"])
    os.kill(peer, signal.SIGKILL)
    os.killpg(rank, signal.SIGKILL)  # with what would remove its folder

    home.until(lambda: home.run(runs["no-rank"]).status == "failed", "the failure to be recorded")
    assert "killed by signal 9 (SIGKILL" in home.run(runs["no-rank"]).reason
    home.until(lambda: home.run(runs["no-peer"]).status == "failed", "the peer to be missed")
    assert "killed by signal 9 (SIGKILL" in home.run(runs["no-peer"]).reason
    assert home.rlx("resume", runs["no-supervisor"], "-dq").returncode == 0
    # An attempt sweeps up after earlier ones before it starts its ranks.
    home.until(
        lambda: {*map(temporary_folder, home.ranks(runs["no-supervisor"]))} - {None, *folders},
        "the second attempt to start its rank",
    )
    os.kill(home.run(runs["no-supervisor"]).pid, signal.SIGKILL)
    again = submit("no-supervisor", 1)
    assert again != runs["no-supervisor"], "nobody was left to run it"
    assert home.run(runs["no-supervisor"]).status == "lost"
    home.until(
        lambda: home.rlx("stop", again).returncode == 0, "it to be told"
    )  # it may be starting
    home.until(lambda: not home.processes(), "every process to end")
    assert not list(home.path.glob("runs/*/reserve"))
    assert not any(folder.exists() for folder in folders)


def test_a_hanging_import_is_shown_in_the_log(own_home, monkeypatch, tmp_path):
    clock = ForwardClock(tmp_path)
    # The first large import of a rank; `submit` reads no more of it than its version.
    torch = tmp_path / "torch"
    torch.mkdir()
    reached = tmp_path / "reached"
    hanging = f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(100_000)\n"
    (torch / "__init__.py").write_text(hanging)
    shutil.copy(Path(find_spec("torch").origin).with_name("version.py"), torch)
    path = f"{tmp_path}{os.pathsep}{own_home.environment['PYTHONPATH']}"
    environment = {**own_home.environment, "PYTHONPATH": path}
    for name, value in clock.hand_to(environment).items():
        monkeypatch.setitem(own_home.environment, name, value)
    sets = {**own_home.long, "runner.hang_after": 400, "runner.max_attempts": 1}
    run = own_home.submit("-d", sets=sets)
    own_home.until(reached.exists, "its rank to import torch")

    def has_ended():
        clock.set_forward(10)
        return own_home.run(run).ended

    own_home.until(has_ended, "the run to end")
    assert own_home.run(run).reason.startswith("no progress for 400 s; the log shows")
    log = (Path(own_home.run(run).directory) / "run.log").read_text()
    assert 'torch/__init__.py", line 3 in <module>' in log
