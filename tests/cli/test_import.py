"""`rlx db import` and MLflow: what it knew before the registry was lost is not told again."""

import pytest

from rlx.cli import main
from rlx.record.mirror import MlflowMirror
from rlx.record.mlflow_client import MirrorClient
from rlx_registry import Registry

pytestmark = [
    pytest.mark.usefixtures("folder"),
    # MLflow's own, under SQLAlchemy 2.1.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]
STORE = "sqlite:///{home}/mlflow.db"


@pytest.fixture
def home(folder):
    return folder / "home"


def opened(home):
    return Registry.open(f"sqlite:///{home}/registry.db")


def test_mlflow_is_told_what_is_new_alone(home, capsys):
    client = MirrorClient(f"sqlite:///{home}/mlflow.db")
    runs = home / "runs"
    with opened(home) as registry:
        for name in ("told", "behind"):
            run, _ = registry.submit(
                digest=name, seed=0, name=name, spec={"tracking": {"mlflow": STORE}}, yaml="",
                plugins=[], code={}, environment={},
            )  # fmt: skip
            (runs / run.id).mkdir(parents=True)
            registry.update_run(run.id, directory=runs / run.id)
            registry.transition(run.id, ["submitted"], "running")
            registry.results.add_metrics(run.id, 1, {"train/loss": 0.5, "train/kl": 0.1})
            uri = f"sqlite:///{home}/mlflow.db"
            mirror = MlflowMirror(registry, run.id, uri, home / "mlartifacts")
            mirror.begin()
            assert mirror.deliver() == 2
            registry.results.add_metrics(run.id, 2, {"train/loss": 0.25})
            registry.transition(run.id, ["running"], "finished")
            if name == "told":
                assert mirror.finish("finished") == 1
    for file in home.glob("registry.db*"):
        file.unlink()
    assert main(["db", "import", str(runs)]) == 0
    capsys.readouterr()
    assert main(["check", "--repair"]) == 0
    assert capsys.readouterr().out == "r-0002: 1 point sent to MLflow\n"
    assert main(["check", "--repair"]) == 0
    assert capsys.readouterr().out == "MLflow is up to date\n"
    with opened(home) as registry:
        for run in registry.runs():
            shown = client.find(run.mlflow_run_id)
            assert shown.status == "FINISHED"
            points = client.points(shown.id, "train/loss")
            assert sorted((p.step, p.value) for p in points) == [(1, 0.5), (2, 0.25)]
