"""Programs of a model in the sandbox: none reaches anything outside, and each has its reason."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from engines import has_ended
from hostile_programs import ENDED, TIME, list_hostile_programs
from patience import wait_until

from rlx.plugin import Sample
from rlx.reward import RewardJob, RewardPool
from rlx.testing import reward_checks
from rlx.testing.promise import run_checks
from rlx_plugins.code.command import Command
from rlx_plugins.code.python_tests import PythonTests

SECRET = "canary of the world outside"
LIMITS = {"seconds": 1.5, "cpu_seconds": 1, "memory_mb": 128, "processes": 8, "output_kb": 64}


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap():
    if shutil.which("bwrap") is None:
        if "RLX_CI" in os.environ:
            pytest.fail("bubblewrap is not installed")
        pytest.skip("bubblewrap is not installed")


class Doors:
    """Sockets outside, which count who knocks."""

    def __init__(self, folder):
        self.knocks = []
        self._sockets = [
            socket.socket(),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
        ]
        for each, address in zip(
            self._sockets, (("127.0.0.1", 0), f"{folder}/door", f"\0{folder}/door"), strict=True
        ):
            each.bind(address)
            each.listen()
            threading.Thread(target=self._count, args=(each,), daemon=True).start()
        self.port = self._sockets[0].getsockname()[1]

    def _count(self, listening):
        while True:
            try:
                self.knocks.append(listening.accept())
            except OSError:
                return

    def close(self):
        for each in self._sockets:
            each.shutdown(socket.SHUT_RDWR)
            each.close()


def build_job(code, test, **options):
    reward = PythonTests(**{**LIMITS, **options})
    sample = Sample(
        id="a", problem={"tests": test}, turn="answer", number=1, response=f"```python\n{code}\n```"
    )
    return RewardJob(reward, (sample,), deadline=120.0)


def list_sandboxes():
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            found += [process] * (process.name() == "bwrap")
    return found


def list_files(folder):
    return sorted((str(p), p.lstat().st_mode) for p in Path(folder).rglob("*"))


def test_no_program_reaches_anything_outside_and_each_has_its_reason(tmp_path, monkeypatch):
    canary = tmp_path / "secret"
    canary.write_text(SECRET)
    monkeypatch.setenv("RLX_CANARY", SECRET)
    doors = Doors(tmp_path)
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        before = list_files(tmp_path)
        programs = list_hostile_programs(
            str(canary), SECRET, str(tmp_path), doors.port, bystander.pid
        )
        with RewardPool(2, 1024) as pool:
            outcomes = pool.score([build_job(p.code, p.test) for p in programs])
            left = list_sandboxes()
            wait_until("the sandboxes to end", lambda: all(map(has_ended, left)))
        wrong = []
        for program, outcome in zip(programs, outcomes, strict=True):
            (score,) = outcome.verdicts or (None,)
            if score is None:
                wrong.append(f"{program.name}: absent, {outcome.fault}")
            elif score.value != 0.0 or not re.match(program.reason, score.reason or ""):
                wrong.append(f"{program.name}: {score.value:g}, {score.reason!r}")
            elif len(score.reason) > 600:
                wrong.append(f"{program.name}: a reason of {len(score.reason)} characters")
        assert not wrong, "\n".join(wrong)
        assert len(programs) >= 200
        assert not doors.knocks
        assert bystander.poll() is None
        assert list_files(tmp_path) == before and canary.read_text() == SECRET
    finally:
        bystander.communicate(b"\n")
        doors.close()


@pytest.mark.parametrize("kind", [Command, PythonTests])
def test_rewards_that_run_code_keep_the_promises_of_rewards(kind):
    kind.model_validate(dict(kind.examples[0].options)).check()
    run_checks(reward_checks(), kind)


def test_programs_that_read_stdin_cannot_reach_their_outputs(tmp_path):
    canary = tmp_path / "secret"
    canary.write_text(SECRET)
    rows = [
        (f"print(open({str(canary)!r}).read())", r"test 1 of 1: ended: exit code 1"),
        ("import os\nos.kill(os.getppid(), 9)", ENDED),
        ("import os\nos.kill(-1, 9)", rf"{ENDED}|test 1 of 1: .*"),
        ("import os\nos._exit(0)", "test 1 of 1: wrong output"),
        ("import sys\nsys.exit(0)", "test 1 of 1: wrong output"),
        ("while True: print('x' * 999)", r"test 1 of 1: output: more than 64 KiB"),
        ("while True: pass", rf"test 1 of 1: time|{TIME}"),
        ("import os\nwhile True: os.fork()", rf"test 1 of 1: .*|{TIME}"),
        ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\0' * 8)\n"
         "    except OSError: pass", r"unreadable value|test 1 of 1: .*"),
        ("x = bytearray(1 << 40)", r"test 1 of 1: memory: more than 128 MiB"),
        ("import __main__\nraise SystemExit", "test 1 of 1: wrong output"),
    ]  # fmt: skip
    tests = [{"input": "", "output": SECRET}]
    with RewardPool(2, 1024) as pool:
        outcomes = pool.score([build_job(code, tests) for code, _ in rows])
    for (code, reason), outcome in zip(rows, outcomes, strict=True):
        (score,) = outcome.verdicts or (None,)
        assert score is not None, (code, outcome.fault)
        assert score.value == 0.0 and re.match(reason, score.reason or ""), (code, score)
