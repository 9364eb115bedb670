"""What a finished run leaves behind for others: pictures, and MLflow's copy."""

import pytest

from rlx.record.mlflow_tracker import flatten_params
from rlx.record.tracker import make_legal_key

pytestmark = [
    # MLflow's own, under SQLAlchemy 2.1.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]


@pytest.fixture
def mlflow(home):
    from mlflow import MlflowClient  # imported here: it takes two seconds

    return MlflowClient(f"sqlite:///{home.path}/mlflow.db")


def test_pictures_are_drawn_when_asked_for_and_recorded(finished, home, mlflow):
    done = home.rlx("status", finished.id, "--pictures")
    assert done.returncode == 0, done.stderr
    with home.registry() as registry:
        recorded = {a.path for a in registry.results.artifacts(finished.id) if a.kind == "picture"}
    drawn = ("reliability", "curves")
    names = {f"pictures/{n}.{kind}" for n in drawn for kind in ("png", "svg")}
    assert recorded == names
    for name in names:
        content = (finished.root / name).read_bytes()
        assert content.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in content
        assert name in done.stdout
    sent = mlflow.list_artifacts(finished.record.mlflow_run_id, "pictures")
    assert {file.path for file in sent} == names


def test_mlflow_holds_exactly_what_the_registry_holds(finished, home, mlflow):
    mirrored = mlflow.get_run(finished.record.mlflow_run_id)
    assert mirrored.info.status == "FINISHED"
    assert mirrored.data.params == flatten_params(finished.record.settings)
    assert mirrored.data.tags["rlx.run_id"] == finished.id
    with home.registry() as registry:
        series = {
            make_legal_key(n): points for n, points in registry.results.metrics(finished.id).items()
        }
    assert set(mirrored.data.metrics) == set(series)
    for name, points in series.items():
        history = mlflow.get_metric_history(finished.record.mlflow_run_id, name)
        assert sorted((m.step, m.value) for m in history) == points
    files = {file.path for file in mlflow.list_artifacts(finished.record.mlflow_run_id)}
    assert {"spec.yaml", "spec.resolved.json"} <= files
