import os
import socket
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
from patience import find_free_port, stop_process, wait_until

from rlx.errors import EnvironmentFault
from rlx.record.mirror import MirrorUnavailableError, MlflowMirror
from rlx.record.mlflow_ui import require_free_port, ui_command
from rlx_registry import Registry

# MLflow's own, under SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture
def port():
    return find_free_port()


def is_group_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def get_health(url, process):
    assert process.poll() is None, f"the server ended with {process.returncode}"
    with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
        return urllib.request.urlopen(f"{url}/health", timeout=30).read()


def test_rows_wait_for_the_server_and_the_server_leaves_nobody_behind(tmp_path, port):
    url = f"http://127.0.0.1:{port}"
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        run, _ = registry.submit(
            digest="0123456789abcdef",
            seed=0,
            name="rlcr",
            spec={"seed": 0},
            yaml="seed: 0\n",
            plugins=[],
            code={},
            environment={},
        )
        registry.results.add_metrics(run.id, 1, {"train/loss": 0.5})
        mirror = MlflowMirror(registry, run.id, url, tmp_path / "files")
        with pytest.raises(MirrorUnavailableError, match=f"127.0.0.1:{port}"):
            mirror.deliver()

        command, env = ui_command(
            f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "files", "127.0.0.1", port
        )
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            assert wait_until("MLflow", lambda: get_health(url, server)) == b"OK"
            assert mirror.deliver() == 1
            with pytest.raises(EnvironmentFault, match=f"port {port} on 127.0.0.1 is in use"):
                require_free_port("127.0.0.1", port)
        finally:
            stop_process(server)
        wait_until("its child to end", lambda: not is_group_alive(server.pid))
        require_free_port("127.0.0.1", port)

        registry.results.add_metrics(run.id, 2, {"train/loss": 0.4})
        with pytest.raises(MirrorUnavailableError):
            mirror.deliver()
        assert [
            r.step
            for r in registry.results.metric_rows_after(
                run.id, registry.results.mirror_cursor(run.id, "mlflow"), 9
            )
        ] == [2]


def test_a_server_is_small_and_silent_whatever_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "true")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "DEBUG")
    command, env = ui_command("sqlite:///x.db", tmp_path)
    assert command[command.index("--workers") + 1] == "1"
    assert env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert env["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert env["MLFLOW_LOGGING_LEVEL"] == "DEBUG"
    assert env["PATH"] == os.environ["PATH"]


def test_a_taken_port_is_named_with_exit_code_4():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"port {port} on 127.0.0.1 is in use") as fault:
            require_free_port("127.0.0.1", port)
    assert fault.value.exit_code == 4
    require_free_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(EnvironmentFault, match="cannot be used"):
        require_free_port("192.0.2.1", 5000)
