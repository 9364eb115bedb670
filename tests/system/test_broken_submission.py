"""Submissions that are killed: at every moment they leave no run, or one that can go on."""

import json
import subprocess
import sys
from pathlib import Path

from rlx.launch import is_abandoned

KILLER = """
import json, os, signal, sys
import rlx.launch.lifecycle, rlx.cli.submit, rlx.discovery
from rlx.cli import main

TOUCHES = ("open", "os.rename", "os.mkdir", "os.remove", "sqlite3.connect")

def submit(moment, seed):
    # Submits in a child, which is killed at its n-th touch of the home, or starting the supervisor.
    count = -1
    def kill(event, arguments):
        nonlocal count
        home, where = os.environ["RLX_HOME"], str(arguments[:2])
        starts = event == "subprocess.Popen" and "supervisor" in str(arguments)
        touches = home in where and event in TOUCHES
        count += starts or touches
        if starts or (touches and count == moment):
            os.write(2, f"{event} {where}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
    if (child := os.fork()) == 0:
        sys.addaudithook(kill)
        os._exit(main(["submit", "-qd", "--no-rehearsal", *sys.argv[1:], f"--set=seed={seed}"]))
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status

for moment in range(0, 40, 3):
    submit(moment, moment)
submit(None, 1000)
"""


def overrides(home):
    return [f"--set={path}={value}" for path, value in home.small.items()]


def test_a_submission_that_is_killed_leaves_no_run_or_a_whole_one(own_home):
    home, sets = own_home, overrides(own_home)
    command = [sys.executable, "-c", KILLER, str(home.yaml), *sets]
    done = subprocess.run(
        command, env=home.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with home.registry() as registry:
        runs = {run.seed: run for run in registry.runs()}
    assert 1000 in runs, "the last was killed as it started the supervisor"
    assert len(runs) < 15, "the first were killed before anything was recorded"
    for run in runs.values():
        assert (run.status, is_abandoned(run)) == ("submitted", True)
        assert json.loads(Path(run.directory, "spec.json").read_text())["seed"] == run.seed
        said = home.rlx("status", run.id).stdout
        assert f": its submission was interrupted; rlx resume {run.id}" in said
    again = home.rlx("submit", home.yaml, "-q", "--queue", *sets, "--set=seed=1000")
    assert again.stdout.strip() == f"r-{len(runs) + 1:04d}"
    assert home.run(runs[1000].id).status == "lost"
    kept = {path.name for path in (home.path / "runs").glob(".unrecorded-*")}
    assert kept == set(), "the next submission removes what they left"
    assert home.rlx("resume", "-qd", runs[1000].id).returncode == 0
    home.until(lambda: home.run(runs[1000].id).attempt, "the run to begin")
    assert home.rlx("stop", runs[1000].id).returncode == 0
    home.until(lambda: home.run(runs[1000].id).status != "running", "the run to end")
