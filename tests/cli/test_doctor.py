"""`rlx check` on the machine at hand, and with things missing."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from guests import write_distribution

from rlx.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLX_HOME", raising=False)
    monkeypatch.delenv("RLX_REGISTRY", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


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


def test_a_registry_that_cannot_be_read_is_a_fault(folder, monkeypatch, capsys):
    (folder / "data.db").write_bytes(b"no database at all" * 100)
    monkeypatch.setenv("RLX_REGISTRY", f"sqlite:///{folder}/data.db")
    code, lines = found(capsys)
    assert code == 4
    assert lines["registry"]["state"] == "broken"
    assert "data.db" in lines["registry"]["found"]


def test_a_broken_plugin_of_somebody_else_stops_nobody(folder, monkeypatch, capsys):
    points = "[rlx.rewards]\nguest = no_such_module:guest\n"
    write_distribution(folder / "site", "rlx-guest", points)
    monkeypatch.syspath_prepend(folder / "site")
    code, lines = found(capsys)
    assert code == 0
    assert lines["reward plugin"]["found"] == "reward plugin 'guest' failed to import"
    assert lines["reward plugin"]["fix"] == "RLX_DEBUG=1 rlx plugins show guest"


# Packages ----------------------------------------------------------------------------------------


def test_a_package_out_of_range_or_missing_is_a_fault(tmp_path):
    """A site of its own, in which rlx asks for a torch that nobody has."""
    for name, needs in (("rlx", ["torch>=99", "no-such-package>=1"]), ("torch", [])):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        (info / "METADATA").write_text("\n".join(lines + [f"Requires-Dist: {n}" for n in needs]))
    probe = (
        "from rlx.launch.machine import list_packages;"
        "print(*((p.name, p.installed, p.fits, p.command) for p in "
        "list_packages().values()), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        """('torch', '1.0', False, "pip install 'torch>=99'")""",
        """('no-such-package', None, False, "pip install 'no-such-package>=1'")""",
    ]
