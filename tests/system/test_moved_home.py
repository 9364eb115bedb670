"""A home is one folder: it is copied and moved with all that belongs to it."""

import hashlib
import shutil
import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest
from pages import dashboard
from patience import wait_until


@contextmanager
def at(home, path):
    """The command line of a home, at another folder."""
    home.environment["RLX_HOME"], before = str(path), home.environment["RLX_HOME"]
    home.path, was = path, home.path
    try:
        yield home
        wait_until("every process to end", lambda: not home.processes())
    finally:
        home.environment["RLX_HOME"], home.path = before, was


def digests(folder):
    """What a folder holds, without the locks and logs of open databases."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.endswith((".lock", "-shm", "-wal"))
    }


@pytest.fixture(scope="module")
def original(own_home):
    """A home with a run that has finished and one that was stopped before it began."""
    home = own_home
    sets = {**home.mirrored, "phases.1.steps": 1, "phases.0.steps": 1}
    home.submit(sets=sets)
    sets = {**sets, "tracking.mlflow": "null", "seed": 1}
    home.submit("--queue", sets=sets)
    assert home.rlx("stop", "r-0002").returncode == 0
    wait_until("every process to end", lambda: not home.processes())
    return home


def test_a_copy_leaves_the_original_alone(original, tmp_path):
    copy = tmp_path / "copy of it"
    shutil.copytree(original.path, copy)
    before = digests(original.path)
    with at(original, copy) as home:
        for verb in (["eval", "r-0001"], ["check", "r-0001"], ["check", "--repair", "r-0001"]):
            done = home.rlx(*verb)
            assert done.returncode == 0, done.stdout + done.stderr
        with home.registry() as registry:
            labels = {e.label for e in registry.results.evaluations("r-0001")}
        assert Path(home.json("status", "r-0001")["directory"]) == copy / "runs" / "r-0001"
    assert labels >= {"after"}
    assert digests(original.path) == before
    assert digests(copy) != before, "the copy has the new evaluation"
    for location in mlflow_locations(copy / "mlflow.db"):
        assert Path(unquote(location.removeprefix("file://"))).is_relative_to(copy)
    (artifacts,) = (copy / "mlartifacts").glob("rlx/*/artifacts")
    assert (artifacts / "spec.yaml").exists()


def mlflow_locations(store):
    """Where MLflow looks for the artifacts of its experiments and runs."""
    with closing(sqlite3.connect(store)) as database:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            yield from (row for (row,) in database.execute(f"SELECT {column} FROM {table}"))


def test_a_moved_home_goes_on(original, tmp_path):
    copy, moved = tmp_path / "home", tmp_path / "archive" / "2026"
    shutil.copytree(original.path, copy)
    moved.parent.mkdir()
    copy.rename(moved)
    with at(original, moved) as home:
        resumed = home.rlx("resume", "r-0002", "-q")
        assert resumed.returncode == 0, resumed.stderr
        assert home.json("status", "r-0002")["status"] == "finished"
        client = dashboard(f"sqlite:///{moved}/registry.db")
        assert "rlcr" in client.page("/runs/r-0001").text
        assert "advantage" in client.page("/runs/r-0001/rollouts/1").text
    assert not copy.exists()
