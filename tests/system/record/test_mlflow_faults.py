"""A real MLflow server that is killed, slow, cut off, out of space, or out of date."""

import os
import resource
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from patience import find_free_port, stop_process, wait_until

from rlx.record.mirror import MirrorUnavailableError, MlflowMirror
from rlx.record.mlflow_client import MetricPoint, MirrorClient, build_metric_point
from rlx.record.mlflow_tags import build_identity_tags, legal_key
from rlx.record.mlflow_ui import ui_command
from rlx_registry import Registry

pytestmark = [
    # MLflow's own, under SQLAlchemy 2.1.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

TIMEOUT = 2
QUICK = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TIMEOUT),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
}


class Server:
    """`mlflow server` over SQLite, as `rlx web --mlflow` starts it."""

    def __init__(self, folder):
        self.store = folder / "mlflow.db"
        self._log = folder / "log"
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._files = folder / "files"
        self.start()

    def start(self):
        uri = f"sqlite:///{self.store}"
        command, env = ui_command(uri, self._files, "127.0.0.1", self.port)
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        wait_until("MLflow to serve", self._is_healthy)

    def _is_healthy(self):
        assert self._process.poll() is None, self._log.read_text()
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            return urllib.request.urlopen(f"{self.url}/health", timeout=30).read()

    def kill(self):
        stop_process(self._process, signal.SIGKILL)

    def limit_files(self, size):
        """Lets no file of the server grow beyond so many bytes; -1 lifts that."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getpgid(int(folder.name)) == self._process.pid:
                    limits = (size, resource.RLIM_INFINITY)
                    resource.prlimit(int(folder.name), resource.RLIMIT_FSIZE, limits)


class Proxy:
    """Stands before a server and passes everything on, or does what `fault` says.

    `refuse` closes a connection that asks for something; `cut` passes the request on and loses the
    answer; `stall` passes nothing on; `late` passes the request on when its sender has given up.
    Requests in which `about` does not stand are left in peace.
    """

    def __init__(self, port):
        self.fault, self.about = "", b""
        self._port = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                down, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(down,), daemon=True).start()

    def _serve(self, down):
        with down, suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as up:
            fault = ""
            while True:
                (ready, *_), _, _ = select.select([down, up], [], [])
                if not (data := ready.recv(1 << 16)):
                    return
                if ready is up:
                    if fault == "cut":
                        return
                    down.sendall(data)
                    continue
                if b" HTTP/1.1\r\n" in data:  # and not a body that comes behind
                    fault = self.fault if self.about in data else ""
                if fault in ("stall", "late"):
                    time.sleep(1.5 * TIMEOUT)  # scenario
                if fault in ("stall", "refuse"):
                    return
                up.sendall(data)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICK.items():
            patch.setenv(name, value)
        server = Server(tmp_path_factory.mktemp("server"))
        yield server
        server.kill()


@pytest.fixture
def proxy(server):
    with_faults = Proxy(server.port)
    yield with_faults
    with_faults.close()


@pytest.fixture
def registry(tmp_path):
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        yield registry


@pytest.fixture
def run_id(registry, tmp_path):
    run, _ = registry.submit(
        digest=tmp_path.name, seed=0, name="rlcr", spec={"seed": 0}, yaml="seed: 0\n",
        plugins=[], code={}, environment={},
    )  # fmt: skip
    (tmp_path / run.id).mkdir()
    registry.update_run(run.id, directory=tmp_path / run.id)
    registry.transition(run.id, ["submitted"], "running")
    return run.id


@pytest.fixture
def mirror(registry, run_id, proxy, tmp_path):
    return MlflowMirror(registry, run_id, proxy.url, tmp_path / "artifacts")


def take(registry, run_id, steps, offset=0.0):
    for step in steps:
        registry.results.add_metrics(
            run_id, step, {"train/loss": 1 / (step + 1 + offset), "pass@8": 0.1}
        )


def until_it_works(deliver):
    """Calls again and again, as a supervisor does; nothing but `MirrorDown` may come of it."""

    def try_delivery():
        with suppress(MirrorUnavailableError):
            return [deliver()]

    return wait_until("MLflow to come back", try_delivery)[0]


def expected(registry, run_id):
    points = defaultdict(list)
    for row in registry.results.metric_rows_after(run_id, 0, 10**6):
        points[legal_key(row.name)].append(build_metric_point(row))
    return {key: sorted(some) for key, some in points.items()}


@patch.dict(os.environ, {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60"})
def stored(server, registry, run_id):
    """Every point of the one run that MLflow has; [] where one is stored twice."""
    from mlflow import MlflowClient

    client, run = MlflowClient(server.url), registry.run(run_id)
    experiment = client.get_experiment_by_name(run.name)
    (only,) = MirrorClient(server.url).list_tagged_runs(
        experiment.experiment_id, build_identity_tags(run)
    )
    assert only.id == run.mlflow_run_id
    return {
        key: sorted(
            MetricPoint(m.timestamp, m.step, m.value)
            for m in client.get_metric_history(only.id, key)
        )
        for key in only.keys
    }


@patch.dict(os.environ, {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60"})
def status(server, registry, run_id):
    return MirrorClient(server.url).find(registry.run(run_id).mlflow_run_id).status


@pytest.mark.parametrize("fault", ["refuse", "cut", "stall", "late"])
def test_after_any_fault_mlflow_holds_the_registrys_points(
    fault, mirror, proxy, server, registry, run_id
):
    proxy.fault = fault  # from the beginning: the run itself must be made once
    take(registry, run_id, range(4))
    for call in (mirror.begin, mirror.deliver):
        with pytest.raises(MirrorUnavailableError, match=f"MLflow at {proxy.url}"):
            call()
    proxy.fault = ""
    until_it_works(mirror.deliver)
    assert stored(server, registry, run_id) == expected(registry, run_id)
    take(registry, run_id, range(4, 8))
    proxy.fault = fault
    with pytest.raises(MirrorUnavailableError):
        mirror.deliver()
    take(registry, run_id, range(8, 12))
    proxy.fault = ""
    time.sleep(2 * TIMEOUT if fault == "late" else 0)  # scenario: it arrives
    until_it_works(mirror.deliver)
    registry.transition(run_id, ["running"], "finished")
    until_it_works(partial(mirror.finish, "finished"))
    assert stored(server, registry, run_id) == expected(registry, run_id)
    assert status(server, registry, run_id) == "FINISHED"


@pytest.mark.parametrize("fault", ["cut", "late"])
def test_a_run_that_was_made_twice_is_one(fault, mirror, proxy, server, registry, run_id):
    proxy.fault, proxy.about = fault, b"/mlflow/runs/create"
    with pytest.raises(MirrorUnavailableError):
        mirror.begin()
    proxy.fault = ""
    take(registry, run_id, range(4))
    until_it_works(mirror.deliver)
    time.sleep(2 * TIMEOUT if fault == "late" else 0)  # scenario: it arrives
    registry.transition(run_id, ["running"], "finished")
    until_it_works(partial(mirror.finish, "finished"))
    assert stored(server, registry, run_id) == expected(registry, run_id)


def test_nothing_is_printed(mirror, registry, run_id, capfd):
    take(registry, run_id, range(2))
    until_it_works(mirror.begin)
    until_it_works(partial(mirror.finish, "stopped"))
    assert capfd.readouterr() == ("", "")


def test_a_server_that_was_killed_is_caught_up_with(mirror, server, registry, run_id):
    take(registry, run_id, range(5))
    until_it_works(mirror.begin)
    until_it_works(mirror.deliver)
    server.kill()
    for step in range(5, 10):
        take(registry, run_id, [step])
        with pytest.raises(MirrorUnavailableError):
            mirror.deliver()
    server.start()
    take(registry, run_id, range(10, 15))
    assert until_it_works(mirror.deliver) == 20
    assert stored(server, registry, run_id) == expected(registry, run_id)


def test_a_full_disk_under_the_store_loses_nothing(mirror, server, registry, run_id):
    until_it_works(mirror.begin)
    for step in range(30):
        registry.results.add_metrics(
            run_id, step, {f"m{number}": 0.1 * step for number in range(100)}
        )
    server.limit_files(server.store.stat().st_size)
    try:
        with pytest.raises(MirrorUnavailableError):
            mirror.deliver()
        assert registry.results.mirror_cursor(run_id, "mlflow") < 3000
    finally:
        server.limit_files(resource.RLIM_INFINITY)
    until_it_works(mirror.deliver)
    assert stored(server, registry, run_id) == expected(registry, run_id)


def test_a_schema_that_changed_under_the_server_loses_nothing(mirror, server, registry, run_id):
    def rename(before, after):
        with closing(sqlite3.connect(server.store, timeout=20)) as store, store:
            store.execute(f"ALTER TABLE {before} RENAME TO {after}")

    until_it_works(mirror.begin)
    take(registry, run_id, range(4))
    rename("metrics", "metrics_of_another_version")
    try:
        with pytest.raises(MirrorUnavailableError):
            mirror.deliver()
    finally:
        rename("metrics_of_another_version", "metrics")
    assert until_it_works(mirror.deliver) == 8
    assert stored(server, registry, run_id) == expected(registry, run_id)


DELIVER = """
import sys
import rlx.record.mirror
rlx.record.mirror._PAGE = 2
from rlx_registry import Registry
url, run_id, uri, files = sys.argv[1:]
with Registry.open(url) as registry:
    mirror = rlx.record.mirror.MlflowMirror(registry, run_id, uri, files)
    mirror.begin()
    print("begun", flush=True)
    mirror.deliver()
"""


def test_a_mirror_that_was_killed_goes_on_where_it_was(
    mirror, proxy, server, registry, run_id, tmp_path
):
    take(registry, run_id, range(200))
    url = f"sqlite:///{tmp_path}/registry.db"
    arguments = [url, run_id, proxy.url, str(tmp_path / "artifacts")]
    patient = {**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
    process = subprocess.Popen(
        [sys.executable, "-c", DELIVER, *arguments], stdout=subprocess.PIPE, text=True, env=patient
    )
    assert process.stdout.readline() == "begun\n"
    wait_until("twenty points", lambda: registry.results.mirror_cursor(run_id, "mlflow") >= 20)
    stop_process(process, signal.SIGKILL)
    assert 0 < until_it_works(mirror.deliver) < 400
    assert stored(server, registry, run_id) == expected(registry, run_id)


def test_a_step_that_was_taken_again_is_shown_as_it_is_now(mirror, server, registry, run_id):
    take(registry, run_id, range(8))
    until_it_works(mirror.begin)
    until_it_works(mirror.deliver)
    before = registry.run(run_id).mlflow_run_id
    registry.transition(run_id, ["running"], "running", "a rank was killed")
    take(registry, run_id, range(5, 10), offset=0.5)
    until_it_works(mirror.deliver)
    assert stored(server, registry, run_id) == expected(registry, run_id)
    assert registry.run(run_id).mlflow_run_id != before
    assert until_it_works(mirror.deliver) == 0
