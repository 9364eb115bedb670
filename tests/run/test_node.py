"""The process that starts a machine's ranks, for a launcher of several machines: it ends them when
nobody would record their work. Here, the ranks sleep."""

import json
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from engines import has_ended
from patience import LIMIT, wait_until

SLEEPING = """
import sys
from rlx.launch import node
node.SILENCE = float(sys.argv[1])
node.build_torchrun_command = lambda *_: ["sleep", "3600"]
sys.exit(node.main())
"""


class Machine:
    """A machine with ranks.

    Args:
        silence: seconds without a heartbeat that it bears.
    """

    def __init__(self, folder, silence=3600.0):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLEEPING, str(silence)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        order = {"folder": str(folder), "run_id": "r-1", "cwd": str(folder), "environment": {}}
        order |= {"node": 1, "nodes": 2, "ranks": 1, "address": "127.0.0.1", "port": 29500}
        self.say(json.dumps(order))
        self.ranks = wait_until("the ranks", psutil.Process(self.process.pid).children)

    def say(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self):
        """Waits for the end of it and its ranks; returns its exit code and what it has said."""
        said = self.process.stderr.read()
        code = self.process.wait(LIMIT)
        assert all(map(has_ended, self.ranks))
        return code, said


@pytest.fixture
def start(tmp_path):
    started = []

    def start(**settings):
        started.append(Machine(tmp_path, **settings))
        return started[-1]

    yield start
    for machine in started:
        machine.process.kill()
        machine.process.wait()
        machine.process.stderr.close()
        with suppress(BrokenPipeError):
            machine.process.stdin.close()


def test_ranks_end_with_the_process_that_started_them(start):
    machine = start()
    machine.process.stdin.close()
    code, said = machine.end()
    assert code == 1
    assert "the process that started this run is gone" in said


def test_ranks_end_when_no_heartbeat_comes(start):
    code, said = start(silence=1.0).end()
    assert code == 1
    assert "no heartbeat from the run's first machine for 1 s" in said


def test_ranks_stop_when_they_are_asked_to(start, tmp_path):
    machine = start()
    machine.say("")  # a heartbeat
    machine.say("stop")
    code, _ = machine.end()
    assert code == 128 + signal.SIGTERM
    assert not (tmp_path / "failure.json").exists()


def test_ranks_that_are_killed_leave_the_reason(start, tmp_path):
    machine = start()
    machine.ranks[0].kill()
    code, _ = machine.end()
    assert code == 128 + signal.SIGKILL
    reason = json.loads((tmp_path / "failure.json").read_text())
    assert "torchrun was killed by signal 9" in reason["message"]
    assert reason["again"]
