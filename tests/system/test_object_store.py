"""Runs whose home is in an S3 server, and machines that share nothing but it and the registry.

A machine is a cache folder of its own: what another one has written is not below it.
"""

import os
import shutil
import signal
from unittest.mock import patch

import psutil
import pytest
from patience import wait_until
from postgres import server
from s3 import BUCKET, s3_server

from rlx.record import find_run_differences
from rlx_registry import Registry, StoredFolder, locate_working_folder

URL = f"s3://{BUCKET}/team"
CHECKPOINTS = {"runner.checkpoint.every": 2, "runner.checkpoint.keep": 2}


@pytest.fixture(scope="module")
def store():
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def database():
    with server() as running:
        yield running


@pytest.fixture(scope="module")
def team(own_home, store, database):
    """The home of several machines; `use` says on which one the next commands run."""
    own_home.database = database.create()
    own_home.url = database.url(own_home.database)
    own_home.environment |= {**store.environment, "RLX_HOME": URL, "RLX_REGISTRY": own_home.url}

    def use(machine):
        """The machines are of one kind: they share the trial of their products."""
        chosen, kept = own_home.folder / "matmul", own_home.folder / machine / "rlx" / "matmul"
        if not kept.is_symlink():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.symlink_to(chosen)
            chosen.mkdir(exist_ok=True)
        cache = {"XDG_CACHE_HOME": str(own_home.folder / machine)}
        own_home.environment |= cache
        os.environ |= cache  # this process reads records, too
        own_home.path = locate_working_folder(URL)

    own_home.use = use
    with patch.dict(os.environ, {**store.environment, "RLX_HOME": URL}):
        yield own_home


def ask(team, run_id):
    with Registry.open(team.url, read_only=True) as registry:
        return registry.run(run_id)


def told(team, *command):
    done = team.rlx(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def finished(team):
    """A run that one machine has made, whose cache is lost since."""
    team.use("one")
    done = team.rlx("submit", team.yaml, "-q", sets={**team.small, **CHECKPOINTS})
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.move(team.folder / "one", team.folder / "kept")
    return done.stdout.strip()


def test_the_store_has_what_the_run_has_written(team, store, finished):
    folder = next((team.folder / "kept").glob(f"rlx/homes/*/runs/{finished}"))
    there = store.list(f"team/runs/{finished}/")
    here = {
        f"team/runs/{finished}/{path.relative_to(folder).as_posix()}": path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.relative_to(folder).as_posix().startswith(".")
    }
    del here[f"team/runs/{finished}/progress.json"]
    assert there == here
    assert any("/checkpoints/step_000004/" in key for key in there)


def test_another_machine_has_the_run(team, finished):
    team.use("other")
    assert finished in told(team, "runs")
    assert "held-out problems" in told(team, "status", finished)
    assert "warm start" in told(team, "logs", finished)
    assert "</answer>" in told(team, "samples", finished, "--step", "1")
    told(team, "rescore", finished)
    done = team.rlx("check", finished)
    assert done.returncode == 3, done.stdout  # the warm start is in the other machine's cache
    assert "✗" not in done.stdout


def test_another_machine_evaluates_its_model_for_all(team, store, finished):
    team.use("other")
    told(team, "eval", finished, "--problems", "5")
    told(team, "pictures", finished)
    assert any("/evaluations/" in key for key in store.list(f"team/runs/{finished}/"))
    team.use("third")
    told(team, "export", finished, str(team.folder / "model"))


def test_a_run_begins_with_the_checkpoint_of_one_elsewhere(team, finished):
    team.use("fourth")
    origin = ("--from-checkpoint", f"{finished}@latest")
    done = team.rlx("submit", team.yaml, "-q", *origin, sets={**team.brief, "phases.1.steps": 3})
    assert done.returncode == 0, done.stdout + done.stderr
    assert ask(team, done.stdout.strip()).status == "finished"


def test_a_lost_machine_s_run_goes_on_elsewhere(team, store, finished, database):
    """Its numbers are those of a run that nothing has happened to."""
    sets = {**team.small, **CHECKPOINTS, "phases.1.steps": 8, **team.unhurried, **team.held}
    team.use("sixth")
    done = team.rlx("submit", team.yaml, "-q", "--again", sets=sets)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = done.stdout.strip()
    team.use("fifth")
    done = team.rlx("submit", team.yaml, "-qd", "--again", sets=sets)
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = done.stdout.strip()
    wait_until("it to train", lambda: ask(team, run_id).step >= 5)
    team.hold()
    kept = f"team/runs/{run_id}/checkpoints/"
    wait_until("a checkpoint there", lambda: has_manifest(store.list(kept)))
    lose_machine(team, ask(team, run_id))
    team.release()
    old = f"UPDATE rlx_run SET heartbeat = heartbeat - 1000 WHERE id = {int(run_id[2:])}"
    database.execute(team.database, old)
    team.use("seventh")
    told(team, "resume", run_id)
    told(team, "logs", "-f", run_id)
    assert ask(team, run_id).status == "finished"
    with Registry.open(team.url, read_only=True) as registry:
        resumed = [e.message for e in registry.results.events(run_id) if e.kind == "resumed"]
        for run in map(registry.run, (whole, run_id)):  # compared where both are
            StoredFolder.find(run.directory).fetch("")
        assert list(find_run_differences(registry, whole, run_id)) == []
    assert resumed and "step 0" not in resumed[-1], resumed


def has_manifest(keys):
    """Whether a folder is whole: its manifest is sent last."""
    return any(key.endswith("/manifest.json") for key in keys)


def lose_machine(team, run):
    """Kills the supervisor and all that it has started, and takes the machine's disk away."""
    supervisor = psutil.Process(run.pid)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs([supervisor], timeout=30)
    shutil.rmtree(team.folder / "fifth")


def test_a_store_that_is_away_ends_no_run(team, store, finished):
    team.use("eighth")
    sets = {**team.brief, "seed": 7, **team.unhurried, **team.held}
    done = team.rlx("submit", team.yaml, "-qd", sets=sets)
    run_id = done.stdout.strip()
    wait_until("it to train", lambda: ask(team, run_id).step >= 1)
    team.hold()
    store.stop()
    team.release()
    try:
        wait_until("it to end", lambda: ask(team, run_id).ended)
    finally:
        store.start()
    assert ask(team, run_id).status == "finished"
    with Registry.open(team.url, read_only=True) as registry:
        events = registry.results.events(run_id)
    assert any("`rlx sync` sends the rest" in event.message for event in events)
    before = store.list(f"team/runs/{run_id}/")
    told(team, "sync", run_id)
    after = store.list(f"team/runs/{run_id}/")
    assert before.keys() < after.keys()
    assert any("/model/" in key for key in after)


def test_a_run_is_removed_from_the_store(team, store, finished):
    team.use("ninth")
    told(team, "rm", finished, "--checkpoints", "--yes")
    assert not any("/checkpoints/" in key for key in store.list(f"team/runs/{finished}/"))
    refused = team.rlx("export", finished, str(team.folder / "late"))
    assert refused.returncode == 2
    assert "its model after the last step is in" in refused.stderr
    told(team, "rm", finished, "--yes")
    assert store.list(f"team/runs/{finished}/") == {}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RLX_REGISTRY": ""}, "set RLX_REGISTRY, or tracking.registry in the experiment"),
        ({"RLX_HOME": "s3://nowhere/team"}, "RLX_HOME cannot be used: s3://nowhere/team cannot be"),
        ({"RLX_HOME": "ftpx://host/team"}, "ftpx"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run_is_recorded(team, changed, says):
    team.use("tenth")
    earlier = dict(team.environment)
    team.environment |= changed
    try:
        done = team.rlx("submit", team.yaml, "-q", sets={**team.brief, "seed": 9})
    finally:
        team.environment = earlier
    assert done.returncode == 4, done.stderr
    assert says in done.stderr.replace("\n", " ")
    with Registry.open(team.url, read_only=True) as registry:
        assert not [run for run in registry.runs() if run.seed == 9]
