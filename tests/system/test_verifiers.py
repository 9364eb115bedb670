"""The process that asks a taskset of verifiers, without verifiers itself."""

import sys
from pathlib import Path

import pytest
from patience import LIMIT

from rlx_gyms import verifiers_worker
from rlx_gyms.verifiers import RemoteFault, TasksetProcess, TasksetSource, VerifiersTask

SERVES = """
import os, sys, time
print('{"count": 1}', flush=True)
for line in sys.stdin:
    exec(ACTION)
"""


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("time.sleep(60)", "does not answer `score` within 0.5 s"),
        ("while True: os.write(1, b' '); time.sleep(0.05)", "does not answer `score` within 0.5 s"),
        ("print('x' * 2_000_000, flush=True)", "more than one megabyte"),
        ("print('<html>', flush=True)", "invalid JSON"),
        ("print('[]', flush=True)", "sent list"),
        ("print('{\"reward\": NaN}', flush=True)", "NaN"),
        ("os.kill(os.getpid(), 9)", "ended its process in `score`: it says nothing"),
        ("print('reason', file=sys.stderr); os._exit(7)", "ended its process in `score`: reason"),
        ('print(\'{"error": "TaskError", "message": "bad"}\', flush=True)', "TaskError: bad"),
    ],
)
def test_a_process_that_misbehaves_is_named_and_started_again(tmp_path, action, says):
    program = tmp_path / "program.py"
    program.write_text(SERVES.replace("ACTION", repr(action)))
    process = TasksetProcess(TasksetSource(sys.executable, "sums", "{}"), program)
    try:
        for _ in range(2):
            with pytest.raises(RemoteFault, match=says):
                process.request("score", 0.5 if "within" in says else LIMIT, index=0, text="1")
    finally:
        process.close()


FORKS = """
import os, sys, time
sys.path.insert(0, FOLDER)
import verifiers_worker

class Rows:
    tasks = [None]
    def __init__(self, **_): pass
    def score(self):
        if os.fork():
            time.sleep(600)
        os.read(0, 1)  # until nobody asks
        os._exit(0)

verifiers_worker.Rows = Rows
verifiers_worker.main()
"""


def test_a_process_that_has_forked_is_ended_in_time(tmp_path):
    program = tmp_path / "program.py"
    folder = str(Path(verifiers_worker.__file__).parent)
    program.write_text(FORKS.replace("FOLDER", repr(folder)))
    process = TasksetProcess(TasksetSource(sys.executable, "sums", "{}"), program)
    try:
        with pytest.raises(RemoteFault, match=r"does not answer `score` within 0\.5 s"):
            process.request("score", 0.5)
    finally:
        process.close()


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (sys.executable, f"{sys.executable} has no verifiers: .* -m pip install"),
        ("/no/such/python", "/no/such/python cannot be run: No such file"),
    ],
)
def test_an_interpreter_without_verifiers_is_named_before_a_run(python, says):
    with pytest.raises(ValueError, match=says):
        VerifiersTask(taskset="sums", python=python).check()
