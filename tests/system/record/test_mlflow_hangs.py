"""MLflow servers that accept a request and never complete the answer."""

import os
import subprocess
import sys
import threading
from functools import partial

import pytest
from hanging_server import serve_hanging
from patience import LIMIT, wait_until

from rlx.launch import mirroring
from rlx.record import MirrorUnavailableError, MlflowMirror
from rlx.record.time_limit import TimedCaller
from rlx.stopwatch import Stopwatch
from rlx_registry import Registry

PATIENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "3600", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5"}
"""No timeout of a single read ends a request in these tests."""


@pytest.fixture(params=["silent", "drip"])
def server(request):
    with serve_hanging(request.param) as server:
        yield server


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture
def registry(url):
    with Registry.open(url) as registry:
        yield registry


@pytest.fixture
def run_id(registry, tmp_path):
    run, _ = registry.submit(
        digest="d", seed=0, name="rlcr", spec={"seed": 0}, yaml="", plugins=[], code={},
        environment={},
    )  # fmt: skip
    registry.update_run(run.id, directory=tmp_path)
    registry.transition(run.id, ["submitted"], "running")
    registry.results.add_metrics(run.id, 1, {"train/loss": 1.0})
    return run.id


def test_a_delivery_has_an_overall_deadline(server, registry, run_id, monkeypatch):
    for name, value in PATIENT.items():
        monkeypatch.setenv(name, value)
    mirror = MlflowMirror(registry, run_id, server.url, None, seconds=2)

    def deliver():
        with pytest.raises(MirrorUnavailableError, match=r"no complete answer|is still open"):
            mirror.catch_up()
        return server.accepted

    wait_until("the first request", deliver)  # the import of MLflow may use up a delivery
    with pytest.raises(MirrorUnavailableError, match=r"is still open after another \d s"):
        mirror.catch_up()
    assert server.accepted == 1  # requests do not pile up
    assert registry.results.mirror_cursor(run_id, "mlflow") == 0
    server.close()
    with pytest.raises(MirrorUnavailableError, match="MLflow at"):
        mirror.catch_up()


END = """
import sys
from rlx.launch import mirroring
from rlx_registry import Registry
url, run_id, mlflow = sys.argv[1:]
mirroring.FINAL_SECONDS = 2.0
mirror = mirroring.MirrorThread(url, run_id, mlflow, lambda: True)
with Registry.open(url) as registry:
    registry.transition(run_id, ["running"], "finished")
print(mirror.end())
"""


def test_an_ended_run_leaves_a_server_that_hangs(server, url, registry, run_id, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", END, url, run_id, server.url],
        env={**os.environ, **PATIENT, "RLX_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    behind = "MLflow did not answer in 2 s; the registry is complete, and `rlx check --repair`"
    assert behind in done.stdout
    assert registry.run(run_id).status == "finished"


def test_calls_return_and_raise_as_they_are():
    caller = TimedCaller(60)
    assert caller.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 // 0)


def test_a_pause_is_no_part_of_a_call(monkeypatch):
    """SIGSTOP, a suspended machine or a clock that jumps uses up no limit."""
    now = [1000.0]

    def jump():
        now[0] += 86_400
        return now[0]

    watch = partial(Stopwatch, clock=lambda: now[0])
    monkeypatch.setattr("rlx.record.time_limit.Stopwatch", watch)
    caller = TimedCaller(60, 60)
    assert [caller.call(jump) for _ in range(3)] == [1000.0 + 86_400 * n for n in (1, 2, 3)]


class Untouched:
    """A mirror that notes when MLflow is first needed."""

    def __init__(self, *_):
        self.begin = self.needed.set

    def deliver(self):
        return 0

    catch_up = deliver


def test_mlflow_is_not_imported_before_the_first_step(url, registry, run_id, tmp_path, monkeypatch):
    needed = Untouched.needed = threading.Event()
    monkeypatch.setattr(mirroring, "MlflowMirror", Untouched)
    monkeypatch.setenv("RLX_HOME", str(tmp_path))
    mirror = mirroring.MirrorThread(url, run_id, "sqlite:///mlflow.db", lambda: True)
    try:
        assert not needed.wait(3)
        registry.update_run(run_id, step=1)
        wait_until("the mirror to begin", needed.is_set)
    finally:
        mirror.end()
