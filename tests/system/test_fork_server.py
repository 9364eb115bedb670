"""Ranks are forks of a process that has imported their libraries, and that outlives them."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
from forked import cold_starts
from patience import wait_until

from rlx.home import RunFolder
from rlx.launch import LocalLauncher, fork_server
from rlx.launch.devices import NvidiaDriver, TorchBuild
from rlx.launch.leftovers import open_temporary_folder
from rlx.launch.rank_group import ForkServer
from rlx.spec import RunnerSpec


def test_an_attempt_after_the_first_imports_nothing(own_home):
    sets = {**own_home.long, "runner.ranks": 2, "runner.max_attempts": 3}
    with cold_starts():
        run = own_home.rlx("submit", own_home.yaml, "-qd", sets=sets).stdout.strip()

    def has_trained(attempt, beyond):
        record = own_home.run(run)
        assert record.status in ("submitted", "running"), record.reason
        return record.attempt == attempt and record.step > beyond

    def await_attempt(attempt):
        step = own_home.run(run).step
        own_home.until(lambda: has_trained(attempt, step), f"attempt {attempt} to train")
        # The last step of the attempt before may have been recorded after `step` was read.
        ranks = own_home.until(lambda: own_home.ranks(run)[1:] and own_home.ranks(run), "two ranks")
        assert len(ranks) == 2
        return own_home.fork_server(run), ranks

    server, first = await_attempt(1)
    assert {psutil.Process(rank).ppid() for rank in first} == {own_home.run(run).pid}
    assert {os.getsid(rank) for rank in first} == set(first)
    assert "libtorch" in Path(f"/proc/{server}/maps").read_text()
    assert psutil.Process(server).num_threads() == 1
    os.kill(first[1], signal.SIGKILL)

    same, second = await_attempt(2)
    assert same == server
    assert not {*first} & {*second}
    of_server = psutil.Process(server).cmdline()
    assert all(psutil.Process(rank).cmdline() == of_server for rank in second), "none is new"

    os.kill(server, signal.SIGKILL)  # nobody needs it now
    step = own_home.run(run).step
    own_home.until(lambda: own_home.run(run).step > step, "the ranks to train without it")
    os.kill(second[0], signal.SIGKILL)
    other, _ = await_attempt(3)
    assert other != server

    own_home.stop(run)
    own_home.until(lambda: not own_home.processes(), "every process to end")


def test_one_that_ends_before_it_has_forked_ends_the_attempt(tmp_path):
    with cold_starts(), ForkServer(RunFolder(tmp_path), "r-1") as forks:
        ranks = forks.start(os.environ, [{"RANK": "0"}, {"RANK": "1"}])
        assert ranks.poll() is None and ranks.is_alive()
        os.kill(forks.pid, signal.SIGKILL)
        wait_until("it to be missed", lambda: ranks.poll() is not None)
        assert ranks.poll() == -signal.SIGKILL
        assert not ranks.is_direct and not ranks.is_alive() and ranks.pids == ()


def test_ranks_that_are_to_end_are_not_forked_later(tmp_path):
    with cold_starts(), ForkServer(RunFolder(tmp_path), "r-1") as forks:
        ranks = forks.start(os.environ, [{"RANK": "0"}])
        ranks.terminate()
        wait_until("it to end", lambda: not ranks.is_alive())
        ranks.kill()
        ranks.collect()
        assert ranks.pids == ()


def test_without_a_supervisor_nothing_is_forked_and_nothing_is_left(tmp_path, capfd):
    run = RunFolder(tmp_path)
    with cold_starts(), ForkServer(run, "r-1") as forks, open_temporary_folder(run) as temporary:
        forks.start({**os.environ, **temporary}, [{"RANK": "0"}, {"RANK": "1"}])
        process, orders = forks._server
        orders.close()  # as if this process were killed, while libraries are imported
        wait_until("it to end", lambda: process.poll() is not None)
        assert process.returncode == 0
        assert not Path(temporary["TMPDIR"]).exists()
        assert capfd.readouterr().err == ""


def test_orders_do_not_wait_for_imports_however_large_the_environment(tmp_path):
    large = {**os.environ, "RLX_TEST_LARGE": "x" * 60_000}
    with ForkServer(RunFolder(tmp_path), "r-1") as forks:
        forks._command = ["sleep", "infinity"]  # reads nothing
        ranks = [{"RANK": str(rank)} for rank in range(8)]
        starting = threading.Thread(target=forks.start, args=(large, ranks), daemon=True)
        starting.start()
        starting.join(60)
        assert not starting.is_alive(), "it waits for what nobody reads"


def test_a_rank_that_could_not_be_forked_is_missed(monkeypatch):
    fork, forked = os.fork, []

    def fork_once():
        if forked:
            os.kill(os.getpid(), signal.SIGKILL)
        forked.append(True)
        return fork()

    monkeypatch.setattr(os, "fork", fork_once)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ChildProcessError, match="could not be forked"):
        fork_server._fork_rank(theirs)


def test_a_rank_that_is_known_leads_its_process_group(monkeypatch):
    start_session = os.setsid
    monkeypatch.setattr(os, "setsid", lambda: (time.sleep(0.5), start_session()))  # scenario
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if fork_server._fork_rank(theirs):
            signal.pause()
        rank = int(ours.recv(64))
        try:
            assert os.getpgid(rank) == rank
        finally:
            os.kill(rank, signal.SIGKILL)


def test_a_hanging_import_is_shown_in_the_log(own_home, monkeypatch, tmp_path):
    (tmp_path / "deepspeed.py").write_text("import time\ntime.sleep(100_000)\n")
    path = f"{tmp_path}{os.pathsep}{own_home.environment['PYTHONPATH']}"
    monkeypatch.setitem(own_home.environment, "PYTHONPATH", path)
    sets = {**own_home.long, "runner.hang_after": 40, "runner.max_attempts": 1}
    with cold_starts():
        run = own_home.rlx("submit", own_home.yaml, "-qd", sets=sets).stdout.strip()
    own_home.until(lambda: own_home.run(run).ended, "the run to end")
    assert own_home.run(run).reason.startswith("no progress for 40 s; the log shows")
    assert (
        'deepspeed.py", line 2 in <module>'
        in RunFolder(Path(own_home.run(run).directory)).log.read_text()
    )


CUDA, WITHOUT = TorchBuild("2.13.0", "12.8"), TorchBuild("2.13.0+cpu", None)
ROCM = TorchBuild("2.13.0+rocm7.0", None, "7.0")
NO_DRIVER, BROKEN = NvidiaDriver(None, works=False), NvidiaDriver("cannot reach", works=False)


@pytest.mark.parametrize(
    ("device", "build", "driver", "is_on_cpu"),
    [
        ("cpu", CUDA, NvidiaDriver("GPU 0: H100", works=True), True),
        ("auto", WITHOUT, BROKEN, True),
        ("auto", CUDA, NO_DRIVER, True),
        ("auto", CUDA, BROKEN, False),
        ("auto", CUDA, None, False),
        ("auto", ROCM, NO_DRIVER, False),
        ("cuda", CUDA, NO_DRIVER, False),
        ("cuda", CUDA, NvidiaDriver("GPU 0: H100", works=True), False),
    ],
)
def test_ranks_that_may_use_a_gpu_are_not_forked(device, build, driver, is_on_cpu, monkeypatch):
    monkeypatch.setattr("rlx.launch.launcher.torch_build", lambda: build)
    monkeypatch.setattr("rlx.launch.launcher.query_nvidia_driver", lambda: driver)
    assert LocalLauncher(RunnerSpec(device=device)).is_on_cpu == is_on_cpu
