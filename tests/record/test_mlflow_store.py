"""MLflow's SQLite store, created by processes that are killed while they create it."""

import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from rlx.record import MlflowMirror
from rlx.record.mlflow_client import MirrorClient
from rlx.record.mlflow_store import ensure_store
from rlx_registry import Registry

pytestmark = [
    # MLflow's own, under SQLAlchemy 2.1.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

IN_A_MIGRATION = 30
"""A statement after which MLflow cannot go on: it has added a column, and adds it again."""

MAKE = """
import os, signal, sys
import mlflow.store.tracking.sqlalchemy_store
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from rlx.record.mirror import MlflowMirror
from rlx.record.mlflow_client import MirrorClient
from rlx_registry import Registry

how, home, run_id, *moments = sys.argv[1:]
uri = f"sqlite:///{home}/store/mlflow.db"

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at(moment):
    if moment == "before rename":
        Path.replace = die
    elif moment == "after rename":
        rename = Path.replace
        Path.replace = lambda *paths: die(rename(*paths))
    else:
        left = [int(moment)]
        @event.listens_for(Engine, "before_cursor_execute")
        def count_statement(connection, *_):
            left[0] -= "/store/" in str(connection.engine.url)
            if not left[0]:
                die()

def use_store():
    if how == "in place":
        os.makedirs(f"{home}/store", exist_ok=True)
        MirrorClient(uri)
        return
    with Registry.open(f"sqlite:///{home}/registry.db") as registry:
        MlflowMirror(registry, run_id, uri, f"{home}/files").begin()

for moment in moments:
    if os.fork() == 0:
        die_at(moment)
        use_store()
        os._exit(0)
    _, status = os.wait()
    print("killed" if os.WIFSIGNALED(status) else "lived", moment)
"""


@pytest.fixture
def registry(tmp_path):
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
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


def kill_makers(how, tmp_path, run_id, *moments):
    done = subprocess.run(
        [sys.executable, "-c", MAKE, how, str(tmp_path), run_id, *map(str, moments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [f"killed {moment}" for moment in moments], done.stderr


def list_points(uri, registry, run_id):
    points = MirrorClient(uri).points(registry.run(run_id).mlflow_run_id, "train/loss")
    return [(point.step, point.value) for point in points]


def test_a_process_killed_while_it_makes_the_store_leaves_none_that_is_broken(
    tmp_path, registry, run_id
):
    moments = [IN_A_MIGRATION, *random.Random(23).sample(range(1, 1600), 3)]
    kill_makers("mirror", tmp_path, run_id, *moments, "before rename", "after rename")
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    assert MlflowMirror(registry, run_id, uri, tmp_path / "files").deliver() == 1
    assert list_points(uri, registry, run_id) == [(1, 1.0)]
    assert {file.name for file in (tmp_path / "store").iterdir()} == {"mlflow.db", "mlflow.db.lock"}


@pytest.mark.parametrize("moment", [IN_A_MIGRATION, 1675])
def test_a_half_made_store_of_an_older_version_is_made_again(tmp_path, registry, run_id, moment):
    kill_makers("in place", tmp_path, run_id, moment)
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    mirror = MlflowMirror(registry, run_id, uri, tmp_path / "files")
    assert mirror.deliver() == 1
    assert list_points(uri, registry, run_id) == [(1, 1.0)]
    (event,) = registry.results.events(run_id)
    assert (event.kind, event.level) == ("mlflow_store_remade", "warning")
    assert "was left incomplete" in event.message and "`rlx check --repair`" in event.message
    assert (tmp_path / "store" / "mlflow.db.half-made").exists()
    assert list(mirror.find_differences()) == []


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    assert ensure_store(f"sqlite:///{folder}/empty.db") is None
    return folder / "empty.db"


def test_a_whole_store_and_other_databases_are_left_alone(tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "whole.db")
    assert ensure_store(f"sqlite:///{tmp_path}/whole.db") is None  # its artifacts follow it
    (tmp_path / "text.db").write_text("no database\n" * 100)
    with closing(sqlite3.connect(tmp_path / "other.db")) as other, other:
        other.execute("CREATE TABLE mine (x)")
    for name in ("whole.db", "text.db", "other.db"):
        before = (tmp_path / name).read_bytes()
        assert ensure_store(f"sqlite:///{tmp_path}/{name}") is None
        assert (tmp_path / name).read_bytes() == before


def test_each_difference_from_the_registry_is_named(tmp_path, empty_store, registry, run_id):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    mirror = MlflowMirror(registry, run_id, f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "files")
    assert list(mirror.find_differences()) == [f"MLflow has no run of {run_id}"]
    registry.results.add_metrics(run_id, 2, {"train/loss": 2.0, "train/kl": 0.1})
    mirror.deliver()
    assert list(mirror.find_differences()) == []
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("UPDATE metrics SET value = 3 WHERE key = 'train/loss' AND step = 2")
        store.execute("INSERT INTO latest_metrics SELECT 'odd', value, timestamp, step, is_nan, "
                      "run_uuid FROM latest_metrics WHERE key = 'train/kl'")  # fmt: skip
        store.execute("INSERT INTO metrics SELECT 'odd', value, timestamp, run_uuid, step, is_nan "
                      "FROM metrics WHERE key = 'train/kl'")  # fmt: skip
    registry.results.add_metrics(run_id, 3, {"train/kl": 0.2})
    registry.transition(run_id, ["running"], "finished")
    assert list(mirror.find_differences()) == [
        f"{run_id} is finished, and RUNNING in MLflow",
        "MLflow's odd has 1 points and the registry's 0; they differ at step 2",
        "MLflow's train/kl has 1 points and the registry's 2; they differ at step 3",
        "MLflow's train/loss has 2 points and the registry's 2; they differ at step 2",
    ]
