"""`rlx check --repair` over a registry that was filled by hand, and a real MLflow store."""

import shutil

import pytest
from patience import find_free_port
from submissions import submit

from rlx.cli import main
from rlx.record import prepare_store
from rlx_registry import Registry

pytestmark = [
    pytest.mark.usefixtures("folder"),
    # MLflow's own, under SQLAlchemy 2.1.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]
STORE = "sqlite:///{home}/mlflow.db"


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    store = tmp_path_factory.mktemp("mlflow") / "empty.db"
    prepare_store(f"sqlite:///{store}")
    return store


@pytest.fixture
def registry(folder, empty_store):
    with Registry.open(f"sqlite:///{folder}/home/registry.db") as opened:
        shutil.copy(empty_store, folder / "home" / "mlflow.db")
        yield opened


@pytest.fixture
def client(folder):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/home/mlflow.db")


def started(registry, name, mlflow=STORE, steps=3):
    run = submit(registry, digest=name, name=name, spec={"tracking": {"mlflow": mlflow}})
    registry.transition(run.id, ["submitted"], "running")
    for step in range(steps):
        registry.results.add_metrics(run.id, step, {"train/loss": 0.5, "train/kl": 0.1})
    return run.id


def ended(registry, name, status="finished", **options):
    run_id = started(registry, name, **options)
    registry.transition(run_id, ["running"], status)
    return run_id


def shown(registry, client, run_id):
    return client.get_run(registry.run(run_id).mlflow_run_id).info.status


def test_every_run_that_is_behind_is_told_once(registry, client, capsys):
    ids = [ended(registry, name, end) for name, end in (("a", "finished"), ("b", "failed"))]
    ended(registry, "c", mlflow=None)
    going_on = started(registry, "d")
    assert main(["check", "--repair"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{i}: 6 points sent to MLflow" for i in ids]
    assert [shown(registry, client, run_id) for run_id in ids] == ["FINISHED", "FAILED"]
    assert registry.run(going_on).mlflow_run_id is None
    assert main(["check", "--repair"]) == 0
    assert capsys.readouterr().out == "trackers are up to date\n"


def test_a_run_by_name_is_told_what_is_left_whether_it_goes_on_or_not(registry, client, capsys):
    run_id = started(registry, "a")
    assert main(["check", "--repair", "a"]) == 0
    assert shown(registry, client, run_id) == "RUNNING"
    registry.results.add_metrics(run_id, 3, {"train/loss": 0.4})
    registry.transition(run_id, ["running"], "stopped")
    assert main(["check", "--repair", "a", run_id]) == 0
    said = capsys.readouterr().out
    assert said == f"{run_id}: 6 points sent to MLflow\n{run_id}: 1 point sent to MLflow\n"
    assert shown(registry, client, run_id) == "KILLED"


def test_a_run_whose_supervisor_died_is_running_in_mlflow_no_more(registry, client, monkeypatch):
    run_id = started(registry, "a")
    assert main(["check", "--repair", "a"]) == 0
    assert shown(registry, client, run_id) == "RUNNING"
    with monkeypatch.context() as patch:
        patch.setattr("rlx_registry.records.HEARTBEAT_LIMIT", -1.0)  # silent for too long
        assert main(["check", "--repair"]) == 0
    assert shown(registry, client, run_id) == "FAILED"
    assert main(["check", "--repair", "a"]) == 0  # it was suspended, not dead
    assert shown(registry, client, run_id) == "RUNNING"
    registry.transition(run_id, ["running"], "lost", "no heartbeat")
    assert main(["check", "--repair"]) == 0
    assert shown(registry, client, run_id) == "FAILED"


def test_mlflow_away_is_exit_code_4_and_holds_up_no_other(registry, client, capsys):
    nowhere = f"http://127.0.0.1:{find_free_port()}"
    lost = [ended(registry, name, mlflow=nowhere) for name in ("a", "b")]
    there = ended(registry, "c")
    assert main(["check", "--repair"]) == 4
    said = capsys.readouterr()
    assert said.out == f"{there}: 6 points sent to MLflow\n"
    assert said.err.startswith(f"error: MLflow at {nowhere}: ")
    assert said.err.count("\n") == 1
    assert [registry.results.mirror_cursor(run_id, "mlflow") for run_id in lost] == [0, 0]
    assert main(["check", "--repair", lost[0]]) == 4


def test_a_run_without_a_mirror_is_refused_and_nothing_is_sent(registry, capsys):
    mirrored, alone = ended(registry, "a"), ended(registry, "b", mlflow=None)
    assert main(["check", "--repair", mirrored, alone]) == 2
    assert f"{alone} has no tracker" in capsys.readouterr().err
    assert registry.run(mirrored).mlflow_run_id is None


def test_a_page_of_runs_that_mlflow_lacks_is_refused(registry, capsys):
    run_id = ended(registry, "rlcr")
    assert main(["web", "--mlflow", run_id]) == 2
    assert f"MLflow has no records of {run_id} yet; `rlx check --repair`" in capsys.readouterr().err
    assert main(["web", "--mlflow", "rlcrr"]) == 2
    assert "did you mean 'rlcr'?" in capsys.readouterr().err
    served = ended(registry, "kg", mlflow="http://127.0.0.1:1/")
    registry.update_run(served, mlflow_run_id="m", mlflow_experiment_id="3")
    assert main(["web", "--mlflow", served]) == 2
    link = "http://127.0.0.1:1/#/experiments/3/runs/m?workflowType=machine_learning"
    assert link in capsys.readouterr().err
