"""What the supervisor starts for an attempt, and how it ends a launcher of ranks elsewhere."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from engines import has_ended
from patience import LIMIT, wait_until

from rlx.home import RunFolder
from rlx.launch.launcher import RankProcesses

LAUNCHER = """
import sys
from rlx.launch.launcher import LauncherInput
given = LauncherInput()
while not given.is_closed and not given.stop:
    given.receive(0.05)
sys.exit(7 if given.stop else 9)
"""
NODE = """
import sys
from rlx.launch import slurm
slurm.build_torchrun_command = lambda *_: ["sleep", "3600"]
sys.exit(slurm.main(sys.argv[1], "r-1", "1", "2", "29500"))
"""


def start(*commands, **options):
    return RankProcesses([(one, os.environ) for one in commands], **options)


def start_launcher():
    return start([sys.executable, "-c", LAUNCHER], are_ranks=False, reads_input=True)


def test_the_signal_that_killed_a_rank_counts_more_than_the_failure_of_its_peer():
    ranks = start(["false"], ["sleep", "3600"], are_ranks=True)
    os.kill(ranks.pids[1], signal.SIGKILL)
    wait_until("both to end", lambda: not ranks.is_alive())
    assert ranks.poll() == -signal.SIGKILL
    ranks.kill()
    assert ranks.poll() == -signal.SIGKILL


def test_ranks_lead_process_groups_and_are_stopped_by_a_signal():
    ranks = start(["sleep", "3600"], ["sleep", "3600"], are_ranks=True)
    assert [os.getpgid(pid) for pid in ranks.pids] == [*ranks.pids]
    assert ranks.poll() is None
    ranks.stop()
    wait_until("both to end", lambda: not ranks.is_alive())
    assert ranks.poll() == -signal.SIGTERM


def test_a_launcher_is_told_by_its_input():
    launcher = start_launcher()
    launcher.stop()
    wait_until("it to end", lambda: not launcher.is_alive())
    launcher.kill()
    assert launcher.poll() == 7
    launcher = start_launcher()
    launcher.kill()
    assert launcher.poll() == 9, "it has ended its ranks before it is killed"


def test_a_command_that_cannot_start_leaves_no_other(tmp_path):
    with pytest.raises(FileNotFoundError):
        start(["sleep", "3601"], [str(tmp_path / "missing")], are_ranks=True)
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            assert process.cmdline() != ["sleep", "3601"]


class Node:
    """A node of a Slurm job, whose torchrun sleeps."""

    def __init__(self, folder):
        own = {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_NODEID": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, str(folder)],
            stdin=subprocess.PIPE,
            env={**os.environ, **own},
        )
        self.ranks = wait_until("the ranks", psutil.Process(self.process.pid).children)

    def end(self):
        """Waits for the end of it and its ranks; returns its exit code."""
        code = self.process.wait(LIMIT)
        assert all(map(has_ended, self.ranks))
        return code


@pytest.fixture
def node(tmp_path):
    started = Node(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()
    started.process.stdin.close()


def test_ranks_of_a_node_end_with_the_supervisor(node):
    node.process.stdin.close()
    assert node.end() == 1


def test_ranks_of_a_node_stop_when_they_are_asked_to(node, tmp_path):
    node.process.stdin.write(b"stop\n")
    node.process.stdin.flush()
    assert node.end() == 128 + signal.SIGTERM
    assert not RunFolder(tmp_path).failure.exists()


def test_a_killed_torchrun_leaves_the_reason(node, tmp_path):
    node.ranks[0].kill()
    assert node.end() == 128 + signal.SIGKILL
    assert "torchrun was killed by signal 9" in RunFolder(tmp_path).failure.read_text()
