"""The pages of MLflow that show runs."""

import json
from urllib.parse import parse_qs

from rlx_registry import Registry, find_mlflow_link


def add_runs(registry, number, experiment="1", mlflow="sqlite:///{home}/mlflow.db"):
    runs = []
    for seed in range(number):
        run, _ = registry.submit(
            digest=f"{experiment}-{mlflow}", seed=seed, name="rlcr",
            spec={"tracking": {"mlflow": mlflow}}, yaml="", plugins=[], code={}, environment={},
        )  # fmt: skip
        registry.update_run(
            run.id, mlflow_run_id=f"m{experiment}{seed}", mlflow_experiment_id=experiment
        )
        runs.append(registry.run(run.id))
    return runs


def test_one_run_has_a_page_and_several_are_compared(tmp_path):
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        first, second = add_runs(registry, 2)
        (other,) = add_runs(registry, 1, experiment="2")
        (elsewhere,) = add_runs(registry, 1, mlflow="https://mlflow.example/")
        (unmirrored,) = add_runs(registry, 1, mlflow=None)
        many = add_runs(registry, 30, experiment="7")
    one = find_mlflow_link([first, unmirrored])
    assert one.store == "sqlite:///{home}/mlflow.db"
    page = "#/experiments/1/runs/m10?workflowType=machine_learning"
    assert one.url == f"http://127.0.0.1:5000/{page}"

    path, _, query = find_mlflow_link([first, second, other, elsewhere]).page.partition("?")
    found = {key: value for key, (value,) in parse_qs(query).items()}
    assert path == "#/compare-runs"
    assert json.loads(found["runs"]) == ["m10", "m11", "m20"]
    assert json.loads(found["experiments"]) == ["1", "2"]
    assert found["workflowType"] == "machine_learning"

    served = find_mlflow_link([elsewhere])
    assert served.store is None
    assert served.url.startswith("https://mlflow.example/#/experiments/1/runs/m10?")
    assert find_mlflow_link([unmirrored]) is None
    assert find_mlflow_link(many).page.startswith("#/experiments/7/runs?workflowType=")
