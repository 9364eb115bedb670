"""Runs as jobs of a real Ray cluster with its dashboard, which serves Ray Jobs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import psutil
import pytest
from patience import find_free_port, signal_processes, wait_until
from raylets import SETTINGS

from rlx.launch.ray_jobs import _choose_variables
from rlx.record import find_run_differences

OVER = ("finished", "failed", "stopped", "lost")
TOKEN = "of-the-cluster-of-these-tests-alone"


@pytest.fixture(scope="module")
def cluster(own_home):
    """The address of Ray Jobs, and the cluster. Its `python` is the one of the tests."""
    port = find_free_port()
    with tempfile.TemporaryDirectory(prefix="rlx-jobs-") as folder:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += ["--include-dashboard=true", f"--dashboard-port={port}", "--num-cpus=2"]
        command += [f"--port={find_free_port()}", f"--temp-dir={folder}"]
        command += [f"--dashboard-agent-listen-port={find_free_port()}"]  # others have the default
        command += ["--object-store-memory=80000000", "--num-gpus=0"]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, **SETTINGS, "PATH": path}
        environment["PYTHONPATH"] = own_home.environment["PYTHONPATH"]
        own_home.environment["RAY_AUTH_TOKEN"] = TOKEN
        environment |= {"CUDA_VISIBLE_DEVICES": "", "RAY_AUTH_TOKEN": TOKEN}
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        ) as head:
            address = f"http://127.0.0.1:{port}"
            trial = {"entrypoint": "true"}
            wait_until("Ray to take jobs", lambda: ask(address, "jobs/", "POST", trial))
            try:
                yield address, head
            finally:
                head.terminate()
                head.wait()
                signal_processes(find_cluster(folder), signal.SIGKILL)


def find_cluster(folder):
    """Processes of the cluster that are still there."""
    words = [(p.pid, " ".join(p.info["cmdline"] or ())) for p in psutil.process_iter(["cmdline"])]
    return [pid for pid, line in words if folder in line and pid != os.getpid()]


def ask(address, place, method="GET", content=None):
    """What Ray Jobs answers, as text; nothing if it does not."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(f"{address}/api/{place}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def find_job(home, run):
    return json.loads((Path(home.run(run).directory) / "job.json").read_text())["job"]


@pytest.fixture(scope="module")
def sets(own_home, cluster):
    launcher = json.dumps({"kind": "ray", "address": cluster[0]})
    sets = {**own_home.brief, "model.warm_start.steps": 10, "runner.checkpoint": "{every: 1}"}
    return {**sets, "runner.launcher": launcher}


def submit(home, sets, *more):
    done = home.rlx("submit", home.yaml, "-qd", *more, sets=sets)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_job_has_the_numbers_of_this_machine(own_home, sets):
    run = submit(own_home, sets)
    own_home.until(lambda: own_home.json("status", run)["status"] in OVER, "the job to end")
    record = own_home.run(run)
    assert record.status == "finished", record.reason
    here = submit(own_home, {**sets, "runner.launcher": "local"}, "--again")
    own_home.until(lambda: own_home.run(here).ended, "the run here to end")
    with own_home.registry() as registry:
        assert list(find_run_differences(registry, here, run)) == []
    log = own_home.rlx("logs", run)
    assert "completed" in log.stdout or "step" in log.stdout, "what it printed is in the run's log"


def test_a_run_is_stopped_and_goes_on_as_another_job(own_home, sets):
    long = {**sets, **own_home.unhurried, "phases.0.steps": 40, "seed": 2}
    run = submit(own_home, long)
    own_home.until(lambda: own_home.run(run).step > 1, "it to train")
    first = find_job(own_home, run)
    assert own_home.rlx("stop", run).returncode == 0
    own_home.until(lambda: own_home.run(run).ended, "it to stop")
    assert own_home.run(run).status == "stopped"
    assert own_home.rlx("resume", run, "-d").returncode == 0
    own_home.until(lambda: own_home.run(run).ended, "it to end")
    assert own_home.run(run).status == "finished", own_home.run(run).reason
    assert find_job(own_home, run) != first


def test_an_address_where_nothing_answers_is_refused_before_a_run_is_recorded(own_home, sets):
    launcher = json.dumps({"kind": "ray", "address": f"http://127.0.0.1:{find_free_port()}"})
    other = {**sets, "runner.launcher": launcher, "seed": 9}
    done = own_home.rlx("submit", own_home.yaml, sets=other)
    assert done.returncode == 4, done.stderr
    assert "no Ray Jobs at" in done.stderr


def test_a_job_that_ray_stops_or_kills_is_not_left_running(own_home, cluster, sets):
    run = submit(own_home, {**sets, "phases.0.steps": 100_000, "seed": 3})
    own_home.until(lambda: own_home.run(run).step > 1, "it to train")
    os.kill(own_home.run(run).pid, signal.SIGKILL)
    own_home.until(
        lambda: own_home.json("status", run)["status"] == "lost", "rlx to see that the job failed"
    )
    assert own_home.rlx("resume", run, "-d").returncode == 0
    own_home.until(lambda: own_home.run(run).status == "running", "it to go on")
    address, head = cluster
    ask(address, f"jobs/{find_job(own_home, run)}/stop", "POST")
    own_home.until(
        lambda: own_home.json("status", run)["status"] in ("stopped", "lost"), "Ray to stop it"
    )
    own_home.until(lambda: not own_home.ranks(run), "its ranks to end")
    head.terminate()
    head.wait()
    before = own_home.run(run).step
    done = own_home.rlx("resume", run, "-d", "--set", "runner.launcher=local")
    assert done.returncode == 0, done.stderr
    own_home.until(lambda: own_home.run(run).step > before, "it to train here")
    assert own_home.rlx("stop", run).returncode == 0
    own_home.until(lambda: own_home.run(run).ended, "it to stop")
    assert own_home.run(run).status == "stopped", own_home.run(run).reason


def test_a_job_gets_no_secret():
    told = _choose_variables(
        {
            "RLX_HOME": "s3://bucket/rlx",
            "RLX_RUN_REGISTRY": "postgresql://ann:s3cret@db/rlx",
            "RLX_REGISTRY": "postgresql://ann@localhost/rlx",
            "RLX_WEB_TOKEN": "t0ken",
            "RLX_JUDGE_PASSWORD": "p",
            "HF_TOKEN": "hf",
            "AWS_SECRET_ACCESS_KEY": "k",
            "PATH": "/usr/bin",
            "OMP_NUM_THREADS": "1",
        }
    )
    assert told == {"RLX_HOME": "s3://bucket/rlx", "OMP_NUM_THREADS": "1"}
