"""MLflow as a tracker: a real store in a file, as a run and `rlx check --repair` use it."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from rows import each_row
from submissions import submit

from rlx.record import find_mlflow_link, prepare_store
from rlx.record.mlflow_tracker import MlflowTracker
from rlx.record.tracker import RunSender, TrackerUnavailableError, make_legal_key
from rlx.spec import MlflowTrackerSpec
from rlx_registry import Registry

# MLflow's own, under SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

SPEC = {
    "name": "rlcr",
    "seed": 0,
    "model": {"kind": "tiny", "warm_start": None, "betas": [0.9, 0.95]},
    "phases": [{"name": "answers", "steps": 2, "set": {}}],
    "task": {"plugin": "countdown", "prompt": "x" * 7000},
    "tracking": {"registry": "postgresql://ann:s3cret@db/rlx"},
}


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A store without runs; making one takes seconds, so it is made once and copied."""
    store = tmp_path_factory.mktemp("mlflow") / "empty.db"
    prepare_store(f"sqlite:///{store}")
    return store


@pytest.fixture
def registry(tmp_path):
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        yield registry


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def uri(tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def mlflow(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def submit_run(registry, tmp_path):
    given = {"digest": "0123456789abcdef", "code": {"commit": "abc123"}, "yaml": "name: rlcr\n"}
    run = submit(registry, name="rlcr", spec=SPEC, **given)
    directory = tmp_path / run.id
    directory.mkdir()
    registry.update_run(run.id, directory=directory)
    registry.transition(run.id, ["submitted"], "running")
    return run.id


@pytest.fixture
def run_id(registry, tmp_path):
    return submit_run(registry, tmp_path)


def send_to(uri, registry, run_id):
    """Makes a sender, as in another process."""
    return RunSender(registry, run_id, "mlflow", MlflowTracker(MlflowTrackerSpec(url=uri)))


@pytest.fixture
def begin(registry, uri):
    return lambda run_id: send_to(uri, registry, run_id)


def history(mlflow, registry, run_id, key):
    found = mlflow.get_metric_history(registry.run(run_id).mlflow_run_id, key)
    return [(m.step, m.value) for m in found]


def only_run(mlflow):
    experiment = mlflow.get_experiment_by_name("rlcr")
    (run,) = mlflow.search_runs([experiment.experiment_id])
    return run


def test_a_run_has_parameters_tags_metrics_spec_and_pictures(
    begin, mlflow, registry, run_id, tmp_path
):
    for step in range(3):
        values = {"train/loss": step / 2, "eval/pass@8": 0.5}
        registry.results.add_metrics(run_id, step, values, at=1e9 + step)
    assert begin(run_id).send() == 6
    run = only_run(mlflow)
    assert registry.run(run_id).mlflow_run_id == run.info.run_id
    assert registry.run(run_id).mlflow_experiment_id == run.info.experiment_id
    assert run.info.status == "RUNNING"
    assert run.data.params["model.betas.1"] == "0.95"
    assert run.data.params["model.warm_start"] == "null"
    assert run.data.params["phases.0.set"] == "{}"
    assert len(run.data.params["task.prompt"]) == 6000
    assert run.data.params["tracking.registry"] == "postgresql://ann:***@db/rlx"
    tags = run.data.tags
    assert (tags["rlx.run_id"], tags["rlx.spec_digest"]) == (run_id, "0123456789abcdef")
    assert (tags["rlx.seed"], tags["mlflow.source.git.commit"]) == ("0", "abc123")
    assert history(mlflow, registry, run_id, "train/loss") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    (first, *_) = mlflow.get_metric_history(run.info.run_id, "eval/pass_at_8")
    assert first.timestamp == 1_000_000_000_000

    (tmp_path / run_id / "plots").mkdir()
    (tmp_path / run_id / "plots/curve.svg").write_text("<svg/>")
    for path in ("plots/curve.svg", "gone.txt"):
        registry.results.add_artifact(run_id, path, "picture")
    figures = {"accuracy": 0.4, "ece": None}
    registry.results.add_evaluation(run_id, 0, "before", "test", 600, figures)
    registry.transition(run_id, ["running"], "stopped", "because")
    begin(run_id).catch_up()
    run = only_run(mlflow)
    assert run.info.status == "KILLED"
    assert run.info.end_time == round(registry.run(run_id).ended * 1000)
    tags = run.data.tags
    assert (tags["rlx.status"], tags["rlx.reason"]) == ("stopped", "because")
    assert "| accuracy | 0.4 |  |" in tags["mlflow.note.content"]
    stored = Path(mlflow.download_artifacts(run.info.run_id, "plots/curve.svg", str(tmp_path)))
    assert stored.read_text() == "<svg/>"
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert folder.is_relative_to(tmp_path / "mlartifacts" / "rlcr")
    assert {file.name for file in folder.glob("spec*")} == {"spec.yaml", "spec.resolved.json"}
    assert not any("s3cret" in file.read_text() for file in folder.rglob("spec*"))


def test_a_crash_before_the_registry_heard_of_the_run_leaves_one_run(
    begin, mlflow, registry, run_id, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "update_run", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            begin(run_id).send()
    begin(run_id).send()
    assert registry.run(run_id).mlflow_run_id == only_run(mlflow).info.run_id


def test_a_repeated_step_with_another_value_makes_the_run_anew(begin, mlflow, registry, run_id):
    for step in (1, 2):
        registry.results.add_metrics(run_id, step, {"train/loss": float(step)})
    begin(run_id).send()
    before = only_run(mlflow).info.run_id
    registry.results.set_mirror_cursor(run_id, "mlflow", 0)
    assert begin(run_id).send() == 2  # equal values: the same points
    assert (only_run(mlflow).info.run_id, len(history(mlflow, registry, run_id, "train/loss"))) == (
        before, 2,
    )  # fmt: skip
    registry.results.add_metrics(run_id, 2, {"train/loss": 9.0})
    begin(run_id).send()
    assert only_run(mlflow).info.run_id != before
    assert history(mlflow, registry, run_id, "train/loss") == [(1, 1.0), (2, 9.0)]


@pytest.mark.parametrize("binned", ["run", "experiment"])
def test_what_was_deleted_in_the_ui_comes_back(begin, mlflow, registry, run_id, binned):
    begin(run_id).send()
    run = registry.run(run_id)
    if binned == "run":
        mlflow.delete_run(run.mlflow_run_id)
    else:
        mlflow.delete_experiment(run.mlflow_experiment_id)
    registry.results.add_metrics(run_id, 1, {"train/loss": 1.0})
    assert begin(run_id).send() == 1
    assert history(mlflow, registry, run_id, "train/loss") == [(1, 1.0)]
    assert only_run(mlflow).info.lifecycle_stage == "active"


def test_a_store_that_was_lost_is_sent_everything_again(registry, run_id, tmp_path, empty_store):
    from mlflow import MlflowClient

    registry.results.add_metrics(run_id, 1, {"train/loss": 1.0})
    for name in ("one", "other"):
        shutil.copy(empty_store, tmp_path / f"{name}.db")
        uri = f"sqlite:///{tmp_path}/{name}.db"
        sender = send_to(uri, registry, run_id)
        assert sender.has_run() is False
        assert sender.send() == 1
        assert sender.has_run()
    assert history(MlflowClient(uri), registry, run_id, "train/loss") == [(1, 1.0)]
    sender.discard()
    sender.discard()
    assert MlflowClient(uri).get_run(registry.run(run_id).mlflow_run_id).info.lifecycle_stage == (
        "deleted"
    )


def test_the_same_run_id_of_another_registry_is_another_run(begin, run_id, uri, mlflow, tmp_path):
    begin(run_id).send()
    other = tmp_path / "other"
    other.mkdir()
    with Registry.open(f"sqlite:///{other}/registry.db") as registry:
        assert submit_run(registry, other) == run_id
        send_to(uri, registry, run_id).send()
    experiment = mlflow.get_experiment_by_name("rlcr")
    assert len(mlflow.search_runs([experiment.experiment_id])) == 2


def test_what_cannot_be_reached_is_said_without_passwords(registry, run_id, tmp_path, begin):
    away = send_to("http://ann:s3cret@127.0.0.1:1", registry, run_id)
    with pytest.raises(TrackerUnavailableError, match=r"ann:\*\*\*@127.0.0.1:1: ") as down:
        away.send()
    assert "s3cret" not in str(down.value) + away.tracker.label
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    with pytest.raises(TrackerUnavailableError, match=r"mlflow\.db"):
        begin(run_id).send()


def test_links_open_the_page_of_training_runs():
    def sent(name, uri="http://mlflow/"):
        own = {"mlflow_run_id": name, "mlflow_experiment_id": "7"}
        return SimpleNamespace(spec={"tracking": {"mlflow": uri}}, **own)

    assert find_mlflow_link([sent(None)]) is None
    one = find_mlflow_link([sent(None), sent("m1")])
    assert one.url == "http://mlflow/#/experiments/7/runs/m1?workflowType=machine_learning"
    elsewhere = sent("m3", "sqlite:///{home}/mlflow.db")
    served = find_mlflow_link([elsewhere])
    assert served.store == "sqlite:///{home}/mlflow.db"
    assert served.url.startswith("http://127.0.0.1:5000/#/experiments/7/runs/m3?")
    both = find_mlflow_link([sent("m1"), sent("m2"), elsewhere]).page
    assert both.startswith(
        "#/compare-runs?runs=%5B%22m1%22%2C%22m2%22%5D&experiments=%5B%227%22%5D"
    )
    many = [sent(f"m{number}") for number in range(25)]
    assert find_mlflow_link(many).page.startswith("#/experiments/7/runs?workflowType=")


@each_row(
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

    assert make_legal_key(name) == legal
    _validate_metric_name(legal)
    _validate_param_name(legal)
