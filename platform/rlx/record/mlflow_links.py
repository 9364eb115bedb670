"""Links to pages of MLflow's UI that show runs."""

import json
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlencode

from rlx_registry import RunRecord

MODE = {"workflowType": "machine_learning"}
"""MLflow's UI starts in the mode for traces, which shows no training runs; links name the other."""
MLFLOW_START_PAGE = f"#/experiments?{urlencode(MODE)}"
"""The list of MLflow's experiments."""
LOCAL_SERVER = "http://127.0.0.1:5000"
"""Where `rlx web --mlflow` serves a store by default."""
COMPARED_RUNS = 24
"""Maximum number of runs that one page compares."""


def get_mlflow_uri(run: RunRecord) -> str | None:
    """Returns the URI of MLflow in a run's experiment, in which `{home}` is not filled in."""
    uri: str | None = (run.spec.get("tracking") or {}).get("mlflow")
    return uri


class MlflowLink(NamedTuple):
    """A page of MLflow's UI, its fragment, and the store to serve first unless it is None."""

    url: str
    page: str
    store: str | None


def find_mlflow_link(runs: Sequence[RunRecord]) -> MlflowLink | None:
    """Returns the page that shows these runs; None if MLflow has none of them.

    One run has a page of its own, several are compared, and more than `COMPARED_RUNS` are among the
    charts of their experiment. Runs of another MLflow than the first one's are left out.
    """
    sent = [run for run in runs if run.mlflow_run_id is not None and get_mlflow_uri(run)]
    if not sent:
        return None
    uri = str(get_mlflow_uri(sent[0]))
    page = _find_page([run for run in sent if get_mlflow_uri(run) == uri])
    if uri.startswith(("http://", "https://")):
        return MlflowLink(f"{uri.rstrip('/')}/{page}", page, None)
    return MlflowLink(f"{LOCAL_SERVER}/{page}", page, uri)


def find_mlflow_charts(run: RunRecord) -> str:
    """Returns the page with the charts of all runs of a run's MLflow experiment."""
    query = urlencode({**MODE, "compareRunsMode": "CHART"})
    return f"#/experiments/{run.mlflow_experiment_id}/runs?{query}"


def _find_page(runs: Sequence[RunRecord]) -> str:
    if len(runs) > COMPARED_RUNS:
        return find_mlflow_charts(runs[-1])
    if len(runs) == 1:
        path = f"experiments/{runs[0].mlflow_experiment_id}/runs/{runs[0].mlflow_run_id}"
        return f"#/{path}?{urlencode(MODE)}"
    lists = {
        "runs": [run.mlflow_run_id for run in runs],
        "experiments": list(dict.fromkeys(run.mlflow_experiment_id for run in runs)),
    }
    query = {name: json.dumps(some, separators=(",", ":")) for name, some in lists.items()}
    return f"#/compare-runs?{urlencode({**query, **MODE})}"
