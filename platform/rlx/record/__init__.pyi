from .differences import find_run_differences
from .mlflow_pages import (
    MLFLOW_START_PAGE,
    find_mlflow_charts,
    find_mlflow_link,
    get_mlflow_uri,
)
from .mlflow_tracker import MLFLOW_ENVIRONMENT, prepare_store
from .probes import StoredPoint, probe_table, read_probe, recorded_probes
from .recorder import Recorder
from .retry import retry_registry_call
from .rollouts import (
    Role,
    StoredStep,
    TrainedRows,
    get_stored_score_name,
    read_pieces,
    read_step,
)
from .tracker import (
    TrackerUnavailableError,
    list_deleting_trackers,
    list_tracker_pages,
    list_tracker_settings,
)
from .tracker_thread import TrackerThreads, open_senders, update_trackers

__all__ = [
    "MLFLOW_ENVIRONMENT",
    "MLFLOW_START_PAGE",
    "Recorder",
    "Role",
    "StoredPoint",
    "StoredStep",
    "TrackerThreads",
    "TrackerUnavailableError",
    "TrainedRows",
    "find_mlflow_charts",
    "find_mlflow_link",
    "find_run_differences",
    "get_mlflow_uri",
    "get_stored_score_name",
    "list_deleting_trackers",
    "list_tracker_pages",
    "list_tracker_settings",
    "open_senders",
    "prepare_store",
    "probe_table",
    "read_pieces",
    "read_probe",
    "read_step",
    "recorded_probes",
    "retry_registry_call",
    "update_trackers",
]
