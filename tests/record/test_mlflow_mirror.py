import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from patience import LIMIT
from rlx.record.mirror import MirrorUnavailableError, MlflowMirror
from rlx.record.mlflow_client import MirrorClient
from rlx.record.mlflow_tags import flat_params, legal_key

from rlx_registry import Registry
from rlx_registry.results import RunResults

# MLflow's own, under SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

SPEC = {
    "name": "rlcr",
    "seed": 0,
    "model": {"kind": "tiny", "warm_start": None, "betas": [0.9, 0.95]},
    "phases": [{"name": "answers", "steps": 2, "set": {}}],
    "task": {"plugin": "countdown", "prompt": "x" * 7000},
}


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """An MLflow store without runs; making one takes seconds, so it is made once and copied."""
    store = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MirrorClient(f"sqlite:///{store}")
    return store


@pytest.fixture
def registry(tmp_path):
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        yield registry


@pytest.fixture
def uri(tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def mlflow(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def submit(registry, tmp_path, seed=0, spec=SPEC):
    run, _ = registry.submit(
        digest="0123456789abcdef",
        seed=seed,
        name="rlcr",
        spec=spec,
        yaml="name: rlcr\n",
        plugins=[],
        code={"commit": "abc123"},
        environment={},
    )
    directory = tmp_path / run.id
    directory.mkdir()
    registry.update_run(run.id, directory=directory)
    registry.transition(run.id, ["submitted"], "running")
    return run.id


@pytest.fixture
def run_id(registry, tmp_path):
    return submit(registry, tmp_path)


@pytest.fixture
def mirror(registry, run_id, uri, tmp_path):
    return MlflowMirror(registry, run_id, uri, tmp_path / "artifacts")


def history(mlflow, registry, run_id, key):
    mlflow_run_id = registry.run(run_id).mlflow_run_id
    return [(m.step, m.value) for m in mlflow.get_metric_history(mlflow_run_id, key)]


def only_run(mlflow, name="rlcr"):
    experiment = mlflow.get_experiment_by_name(name)
    (run,) = mlflow.search_runs([experiment.experiment_id])
    return run


def test_a_run_begins_with_its_parameters_tags_and_spec(mirror, mlflow, registry, run_id, tmp_path):
    mirror.begin()
    run = only_run(mlflow)
    assert registry.run(run_id).mlflow_run_id == run.info.run_id
    assert registry.run(run_id).mlflow_experiment_id == run.info.experiment_id
    assert run.info.status == "RUNNING"
    assert run.data.params["model.betas.1"] == "0.95"
    assert run.data.params["model.warm_start"] == "null"
    assert run.data.params["phases.0.set"] == "{}"
    assert len(run.data.params["task.prompt"]) == 6000
    tags = run.data.tags
    assert (tags["rlx.run_id"], tags["rlx.spec_digest"]) == (run_id, "0123456789abcdef")
    assert (tags["rlx.seed"], tags["mlflow.source.git.commit"]) == ("0", "abc123")
    assert f"`{run_id}`" in tags["mlflow.note.content"]
    assert run.info.artifact_uri.startswith((tmp_path / "artifacts" / "rlcr").as_uri())
    files = {file.path for file in mlflow.list_artifacts(run.info.run_id)}
    assert files == {"spec.yaml", "spec.resolved.json"}


def test_beginning_again_finds_the_same_run(mirror, mlflow, registry, run_id, uri, tmp_path):
    mirror.begin()
    mirror.begin()
    MlflowMirror(registry, run_id, uri, tmp_path / "artifacts").begin()
    assert only_run(mlflow).data.tags["rlx.run_id"] == run_id


def test_a_crash_before_the_registry_heard_of_the_run_leaves_one_run(
    mirror, mlflow, registry, run_id, monkeypatch
):
    monkeypatch.setattr(Registry, "update_run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mirror.begin()
    monkeypatch.undo()
    mirror.begin()
    assert registry.run(run_id).mlflow_run_id == only_run(mlflow).info.run_id


def test_metrics_arrive_in_order_under_legal_names(mirror, mlflow, registry, run_id):
    for step in range(3):
        values = {"train/loss": step / 2, "eval/pass@8": 0.5}
        registry.results.add_metrics(run_id, step, values, at=1e9 + step)
    assert mirror.deliver() == 6
    assert mirror.deliver() == 0
    assert history(mlflow, registry, run_id, "train/loss") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    run = only_run(mlflow)
    (first, *_) = mlflow.get_metric_history(run.info.run_id, "eval/pass_at_8")
    assert first.timestamp == 1_000_000_000_000


def test_a_backlog_goes_in_few_requests_in_the_order_of_writing(
    mirror, registry, run_id, monkeypatch
):
    for step in range(30):
        registry.results.add_metrics(run_id, step, {f"m{number}": 1.0 for number in range(40)})
    sent = []
    mirror.begin()
    monkeypatch.setattr(MirrorClient, "write_metrics", lambda _, __, rows: sent.append(rows))
    assert mirror.deliver() == 1200
    assert [len(rows) for rows in sent] == [1000, 200]
    numbers = [row.seq for rows in sent for row in rows]
    assert numbers == sorted(numbers)


def test_what_was_sent_but_not_noted_is_stored_once(
    mirror, mlflow, registry, run_id, uri, tmp_path, monkeypatch
):
    for step in (1, 2):
        registry.results.add_metrics(run_id, step, {"train/loss": float(step)})
    mirror.begin()
    monkeypatch.setattr(RunResults, "set_mirror_cursor", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mirror.deliver()
    monkeypatch.undo()
    assert registry.results.mirror_cursor(run_id, "mlflow") == 0
    assert history(mlflow, registry, run_id, "train/loss") == [(1, 1.0), (2, 2.0)]
    registry.results.add_metrics(run_id, 3, {"train/loss": 3.0})
    assert MlflowMirror(registry, run_id, uri, tmp_path / "artifacts").deliver() == 3
    assert history(mlflow, registry, run_id, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_tracker_that_fails_in_the_middle_is_caught_up_later(
    mirror, mlflow, registry, run_id, monkeypatch
):
    from mlflow import MlflowClient

    for step in range(4):
        registry.results.add_metrics(run_id, step, {"train/loss": float(step)})
    mirror.begin()
    monkeypatch.setattr("rlx.record.mirror._PAGE", 1)
    send, calls = MlflowClient.log_batch, []

    def third_fails(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise ConnectionResetError("gone away")
        return send(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", third_fails)
    with pytest.raises(MirrorUnavailableError, match="gone away"):
        mirror.deliver()
    assert history(mlflow, registry, run_id, "train/loss") == [(0, 0.0), (1, 1.0)]
    assert mirror.deliver() == 2
    assert history(mlflow, registry, run_id, "train/loss") == [(float(s), s) for s in range(4)]


def test_a_store_of_another_mlflow_is_down_and_not_a_crash(mirror, tmp_path):
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    with pytest.raises(MirrorUnavailableError, match=r"mlflow\.db"):
        mirror.begin()


def test_a_store_that_was_lost_is_told_everything_again(
    mirror, registry, run_id, tmp_path, empty_store
):
    from mlflow import MlflowClient

    registry.results.add_metrics(run_id, 1, {"train/loss": 1.0})
    mirror.deliver()
    shutil.copy(empty_store, tmp_path / "new.db")
    new = f"sqlite:///{tmp_path}/new.db"
    assert MlflowMirror(registry, run_id, new, tmp_path / "artifacts").deliver() == 1
    assert history(MlflowClient(new), registry, run_id, "train/loss") == [(1, 1.0)]


@pytest.mark.parametrize("binned", ["run", "experiment"])
def test_what_was_deleted_in_the_ui_comes_back(
    mirror, mlflow, registry, run_id, binned, uri, tmp_path
):
    mirror.begin()
    run = registry.run(run_id)
    if binned == "run":
        mlflow.delete_run(run.mlflow_run_id)
    else:
        mlflow.delete_experiment(run.mlflow_experiment_id)
    registry.results.add_metrics(run_id, 1, {"train/loss": 1.0})
    assert MlflowMirror(registry, run_id, uri, tmp_path / "artifacts").deliver() == 1
    assert history(mlflow, registry, run_id, "train/loss") == [(1, 1.0)]
    assert only_run(mlflow).info.lifecycle_stage == "active"


@pytest.mark.parametrize(
    ("status", "shown"),
    [("finished", "FINISHED"), ("failed", "FAILED"), ("lost", "FAILED"), ("stopped", "KILLED")],
)
def test_a_run_ends_as_the_registry_says(mirror, mlflow, registry, run_id, status, shown):
    mirror.begin()
    registry.transition(run_id, ["running"], status, "because")
    mirror.finish(status)
    run = only_run(mlflow)
    assert run.info.status == shown
    assert run.info.end_time == round(registry.run(run_id).ended * 1000)
    assert (run.data.tags["rlx.status"], run.data.tags["rlx.reason"]) == (status, "because")


def test_a_run_that_died_without_a_word_is_ended_by_somebody_else(
    mirror, mlflow, registry, run_id, uri, tmp_path
):
    registry.results.add_metrics(run_id, 1, {"train/loss": 1.0})
    mirror.begin()
    del mirror
    registry.results.add_metrics(run_id, 2, {"train/loss": 2.0})
    registry.transition(run_id, ["running"], "lost", "no heartbeat")
    MlflowMirror(registry, run_id, uri, tmp_path / "artifacts").finish("lost")
    assert only_run(mlflow).info.status == "FAILED"
    assert history(mlflow, registry, run_id, "train/loss") == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("status", ["lost", "failed"])
def test_whoever_mirrors_next_ends_what_died_without_a_word(
    mirror, registry, mlflow, run_id, status, uri, tmp_path
):
    mirror.begin()
    registry.transition(run_id, ["running"], status, "no heartbeat")
    going_on, another = (submit(registry, tmp_path, seed) for seed in (1, 2))
    for other in (going_on, another):
        MlflowMirror(registry, other, uri, tmp_path / "artifacts").begin()
    shown = {i: mlflow.get_run(registry.run(i).mlflow_run_id) for i in (run_id, going_on, another)}
    assert [run.info.status for run in shown.values()] == ["FAILED", "RUNNING", "RUNNING"]
    assert shown[run_id].data.tags["rlx.reason"] == "no heartbeat"


def test_passwords_stay_here(registry, mlflow, uri, tmp_path):
    spec = {"tracking": {"registry": "postgresql://ann:s3cret@db/rlx"}, "seed": 0}
    run_id = submit(registry, tmp_path, spec=spec)
    MlflowMirror(registry, run_id, uri, tmp_path / "artifacts").begin()
    run = only_run(mlflow)
    assert run.data.params["tracking.registry"] == "postgresql://ann:***@db/rlx"
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert not any("s3cret" in file.read_text() for file in folder.rglob("spec*"))
    with pytest.raises(MirrorUnavailableError, match=r"ann:\*\*\*@127.0.0.1:1: ") as down:
        MlflowMirror(registry, run_id, "http://ann:s3cret@127.0.0.1:1", None).begin()
    assert "s3cret" not in str(down.value)


def test_a_resumed_run_runs_again(mirror, mlflow, registry, run_id, uri, tmp_path):
    registry.transition(run_id, ["running"], "failed")
    mirror.finish("failed")
    registry.transition(run_id, ["failed"], "running")
    MlflowMirror(registry, run_id, uri, tmp_path / "artifacts").begin()
    assert only_run(mlflow).info.status == "RUNNING"
    assert only_run(mlflow).data.tags["rlx.attempt"] == "2"


def test_finishing_uploads_artifacts_and_says_which_are_missing(
    mirror, mlflow, registry, run_id, tmp_path
):
    (tmp_path / run_id / "plots").mkdir()
    (tmp_path / run_id / "plots/curve.svg").write_text("<svg/>")
    registry.results.add_artifact(run_id, "plots/curve.svg", "picture")
    registry.results.add_artifact(run_id, "gone.txt", "text")
    mirror.finish("finished")
    mirror.finish("finished")
    run = only_run(mlflow)
    stored = Path(mlflow.download_artifacts(run.info.run_id, "plots/curve.svg", str(tmp_path)))
    assert stored.read_text() == "<svg/>"
    assert run.data.tags["rlx.missing_artifacts"] == "gone.txt"


def test_evaluations_are_shown_unless_the_run_reports_them_itself(mirror, mlflow, registry, run_id):
    figures = {"accuracy": 0.4, "ece": 0.3, "auroc": None, "by_stratum": {"2": {"ece": 0.1}}}
    registry.results.add_metrics(run_id, 0, {"eval/own/ece": 0.3})
    for suite in ("own", "test"):
        registry.results.add_evaluation(run_id, 0, "before", suite, 600, figures)
        registry.results.add_evaluation(
            run_id, 9, "after", suite, 600, {**figures, "accuracy": 0.65}
        )
    mirror.finish("finished")
    mirror.finish("finished")
    assert history(mlflow, registry, run_id, "eval/test/accuracy") == [(0, 0.4), (9, 0.65)]
    run = only_run(mlflow)
    assert set(run.data.metrics) == {"eval/own/ece", "eval/test/accuracy", "eval/test/ece"}
    assert "| accuracy | 0.4 | 0.65 |" in run.data.tags["mlflow.note.content"]


def test_only_an_end_ends_a_run(mirror):
    with pytest.raises(ValueError, match="not 'running'"):
        mirror.finish("running")


def test_runs_of_one_experiment_are_told_apart_and_have_equal_keys(registry, uri, mlflow, tmp_path):
    for seed in (0, 1):
        run_id = submit(registry, tmp_path, seed, SPEC | {"seed": seed})
        MlflowMirror(registry, run_id, uri, tmp_path / "artifacts").begin()
    experiment = mlflow.get_experiment_by_name("rlcr")
    first, second = mlflow.search_runs([experiment.experiment_id])
    assert first.data.params.keys() == second.data.params.keys()
    assert {first.data.params["seed"], second.data.params["seed"]} == {"0", "1"}


def test_the_same_run_id_of_another_registry_is_another_run(mirror, run_id, uri, mlflow, tmp_path):
    mirror.begin()
    other = tmp_path / "other"
    other.mkdir()
    with Registry.open(f"sqlite:///{other}/registry.db") as registry:
        assert submit(registry, other) == run_id
        MlflowMirror(registry, run_id, uri, other / "artifacts").begin()
    experiment = mlflow.get_experiment_by_name("rlcr")
    assert len(mlflow.search_runs([experiment.experiment_id])) == 2


BEGIN = """
import sys
from rlx.record.mirror import MlflowMirror
from rlx_registry import Registry
home, run_id = sys.argv[1:]
with Registry.open(f"sqlite:///{home}/registry.db") as registry:
    mirror = MlflowMirror(registry, run_id, f"sqlite:///{home}/fresh/mlflow.db", f"{home}/files")
    mirror.begin()
    print("rlx began", run_id)
"""


def test_two_processes_may_make_the_store_at_once_and_quietly(registry, tmp_path):
    from mlflow import MlflowClient

    ids = [submit(registry, tmp_path, seed) for seed in (0, 1)]
    # Different temporary folders, for MLflow's own lock lies there.
    started = []
    for run_id in ids:
        env = {**os.environ, "TMPDIR": str(tmp_path / run_id)}
        command = [sys.executable, "-c", BEGIN, str(tmp_path), run_id]
        started.append(
            subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    said = [process.communicate(timeout=LIMIT) for process in started]
    assert said == [(f"rlx began {run_id}\n", "") for run_id in ids]
    fresh = MlflowClient(f"sqlite:///{tmp_path}/fresh/mlflow.db")
    experiment = fresh.get_experiment_by_name("rlcr")
    found = fresh.search_runs([experiment.experiment_id])
    assert sorted(run.data.tags["rlx.run_id"] for run in found) == ids


def test_importing_the_mirror_does_not_import_mlflow():
    code = "import sys, rlx.record.mirror, rlx.record.mlflow_ui; print('mlflow' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("train/loss", "train/loss"),
        ("pass@k", "pass_at_k"),
        ("a//b", "a/b"),
        ("/a/../b/", "a/b"),
        ("ünï(x)=1", "_n__x__1"),
        ("", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_become_ones_that_mlflow_takes(name, legal):
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    assert legal_key(name) == legal
    _validate_metric_name(legal)
    _validate_param_name(legal)


def test_parameters_keep_every_leaf():
    assert flat_params({"a": {"b": [1, {"c": True}], "d": []}, "e": 1e-6}) == {
        "a.b.0": "1",
        "a.b.1.c": "true",
        "a.d": "[]",
        "e": "1e-06",
    }
