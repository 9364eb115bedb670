"""`rlx check` on the machine at hand, and with things missing."""

import json
from importlib.metadata import version

import pytest
from guests import write_distribution

from rlx.cli import main


@pytest.fixture(autouse=True)
def folder(folder, monkeypatch):
    """Whose home is the one that nobody has named."""
    monkeypatch.delenv("RLX_HOME")
    return folder


def found(capsys):
    code = main(["check", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (code == 0) == said["ready"]
    return code, {f["name"]: f for f in said["findings"]}


def test_this_machine_can_run_experiments(folder, capsys):
    code, lines = found(capsys)
    assert code == 0
    assert lines["torch"]["found"] == version("torch")
    assert lines["CUDA"]["state"] == "absent"
    assert lines["RLX_HOME"]["found"].startswith(".rlx, ")
    assert lines["registry"]["state"] == "absent"
    assert list(folder.iterdir()) == [], "looking makes nothing"
    for line in lines.values():
        assert (
            (line["state"] == "ok")
            or line["fix"]
            or "not needed" in line["found"]
            or ("create" in line["found"])
        )


def test_a_registry_that_is_lost_beside_its_runs_names_the_way_back(folder, capsys):
    (folder / ".rlx" / "runs" / "r-0001").mkdir(parents=True)
    line = found(capsys)[1]["registry"]
    assert line["state"] == "broken"
    assert "the 1 run folders in" in line["found"]
    assert "put back a backup of registry.db" in line["found"]


def test_what_is_missing_is_named_with_its_fix(folder, monkeypatch, capsys):
    (folder / "file").touch()
    monkeypatch.setenv("RLX_HOME", "file/below")
    code, lines = found(capsys)
    assert code == 4
    assert lines["RLX_HOME"]["state"] == "broken"
    assert lines["RLX_HOME"]["fix"] == "set RLX_HOME to a folder with room"
    assert lines["RLX_HOME"]["found"] == "file/below cannot be written"


def test_a_broken_plugin_of_somebody_else_stops_nobody(folder, monkeypatch, capsys):
    points = "[rlx.rewards]\nguest = no_such_module:guest\n"
    write_distribution(folder / "site", "rlx-guest", points)
    monkeypatch.syspath_prepend(folder / "site")
    code, lines = found(capsys)
    assert code == 0
    assert lines["reward plugin"]["found"] == "reward plugin 'guest' failed to import"
    assert lines["reward plugin"]["fix"] == "RLX_DEBUG=1 rlx plugins show guest"
