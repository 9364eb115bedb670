"""Links to the pages of MLflow's UI that show recorded runs.

The UI has two modes and starts in that for traces of applications, which shows no training runs.
The mode is part of a page's address, so every link names the other one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from rlx_registry.records import RunRecord

__all__ = ["MLFLOW_START_PAGE", "MlflowLink", "find_mlflow_charts", "find_mlflow_link"]

_MODE = {"workflowType": "machine_learning"}
MLFLOW_START_PAGE = f"#/experiments?{urlencode(_MODE)}"
"""The list of MLflow's experiments."""
_SERVED = "http://127.0.0.1:5000"
"""Where `rlx web --mlflow` serves a store by default."""
_MOST = 24
"""Maximum number of runs that one page compares."""


@dataclass(frozen=True, slots=True)
class MlflowLink:
    """A page of MLflow's UI.

    Attributes:
        server: address of the server.
        page: fragment of the page's address.
        store: URI of the store that `rlx web --mlflow` must serve first; None if a server
            runs already.
    """

    server: str
    page: str
    store: str | None

    @property
    def url(self) -> str:
        """The whole address."""
        return f"{self.server}/{self.page}"


def find_mlflow_link(runs: Sequence[RunRecord]) -> MlflowLink | None:
    """Returns the page that shows these runs; None if MLflow has none of them.

    One run has a page of its own, several are compared, and more than `_MOST` are among the charts
    of their experiment. Runs of another MLflow than the first one's are left out.
    """
    known = [run for run in runs if run.mlflow_run_id is not None and _get_uri(run) is not None]
    if not known:
        return None
    uri = str(_get_uri(known[0]))
    same = [run for run in known if _get_uri(run) == uri]
    if uri.startswith(("http://", "https://")):
        return MlflowLink(uri.rstrip("/"), _find_page(same), None)
    return MlflowLink(_SERVED, _find_page(same), uri)


def find_mlflow_charts(run: RunRecord) -> str:
    """Returns the page with the charts of all runs of a run's MLflow experiment."""
    query = urlencode({**_MODE, "compareRunsMode": "CHART"})
    return f"#/experiments/{run.mlflow_experiment_id}/runs?{query}"


def _find_page(runs: Sequence[RunRecord]) -> str:
    if len(runs) > _MOST:
        return find_mlflow_charts(runs[-1])
    if len(runs) == 1:
        (run,) = runs
        path = f"experiments/{run.mlflow_experiment_id}/runs/{run.mlflow_run_id}"
        return f"#/{path}?{urlencode(_MODE)}"
    experiments = list(dict.fromkeys(run.mlflow_experiment_id for run in runs))
    query = {
        "runs": json.dumps([run.mlflow_run_id for run in runs], separators=(",", ":")),
        "experiments": json.dumps(experiments, separators=(",", ":")),
    }
    return f"#/compare-runs?{urlencode({**query, **_MODE})}"


def _get_uri(run: RunRecord) -> str | None:
    uri: str | None = (run.spec.get("tracking") or {}).get("mlflow")
    return uri
