"""A supervisor's own machine looks at its process; others have its heartbeat."""

import json
import subprocess

import pytest
from submissions import NOTHING, silence, submit

from rlx_registry import (
    DeviceRequest,
    Registry,
    forget_supervisor,
    is_supervisor_alive,
    record_supervisor,
)

DEVICE = DeviceRequest("one", ("gpu:0",), 1)


@pytest.fixture
def supervisor():
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def registry(url, tmp_path, supervisor):
    """Has a run with this supervisor, which holds a device."""
    folder = tmp_path / "run"
    folder.mkdir()
    with Registry.open(url) as opened:
        submit(opened)
        opened.update_run("1", directory=str(folder), host="one", pid=supervisor.pid)
        opened.start("1", ["submitted"], devices=DEVICE)
        record_supervisor(folder, supervisor.pid)
        yield opened


def shown(registry):
    """The statuses of the only run that readers show, and whether it holds its device."""
    run = registry.run("1")
    (row,) = registry.queries.run_rows()
    (counted,) = registry.queries.statuses()
    listed = [status for status in ("running", "lost") if registry.runs(statuses=[status])]
    held = bool(registry.devices("one"))
    return {run.effective_status, row.effective_status, counted, *listed}, held


def test_a_killed_supervisors_run_is_lost_to_every_reader(registry, supervisor):
    assert shown(registry) == ({"running"}, True)
    supervisor.kill()
    supervisor.wait()
    assert shown(registry) == ({"lost"}, False)
    same, created = registry.submit(**NOTHING)  # who submits it records its end
    assert (same.id, created) == ("r-0001", False)
    assert [run.id for run in registry.runs(statuses=["lost"])] == ["r-0001"]


def test_a_silent_run_with_a_live_supervisor_is_not_lost(registry, supervisor):
    silence(registry)
    assert shown(registry) == ({"running"}, True)
    assert registry.runs(statuses=["lost"]) == []


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("what", ["boot", "namespace"])
def test_on_another_machine_the_heartbeat_decides(registry, supervisor, tmp_path, what, alive):
    file = tmp_path / "run" / "supervisor.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), what: "another"}))
    if alive:
        supervisor.kill()
        supervisor.wait()
        assert shown(registry) == ({"running"}, True)
    else:
        silence(registry)
        assert shown(registry) == ({"lost"}, False)


def test_a_process_with_the_same_number_is_another(registry, tmp_path):
    file = tmp_path / "run" / "supervisor.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, "started": found["started"] - 1}))
    assert shown(registry) == ({"lost"}, False)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}'])
def test_without_a_description_the_heartbeat_decides(registry, tmp_path, text):
    (tmp_path / "run" / "supervisor.json").write_text(text)
    assert is_supervisor_alive(str(tmp_path / "run")) is None
    assert shown(registry) == ({"running"}, True)
    forget_supervisor(tmp_path / "run")
    silence(registry)
    assert shown(registry) == ({"lost"}, False)
