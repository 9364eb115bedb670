from .mlflow_links import (
    MLFLOW_START_PAGE,
    find_mlflow_link,
)
from .mlflow_tracker import MLFLOW_ENVIRONMENT, prepare_store
from .recorder import Recorder
from .rollouts import (
    Role,
    StoredStep,
    TrainedRows,
    probe_table,
    read_step,
    recorded_probes,
)
from .tracker import (
    TrackerThreads,
    TrackerUnavailableError,
    list_deleting_trackers,
    list_tracker_pages,
    list_tracker_settings,
    open_senders,
    retry_registry_call,
    update_trackers,
)

__all__ = [
    "MLFLOW_ENVIRONMENT",
    "MLFLOW_START_PAGE",
    "Recorder",
    "Role",
    "StoredStep",
    "TrackerThreads",
    "TrackerUnavailableError",
    "TrainedRows",
    "find_mlflow_link",
    "list_deleting_trackers",
    "list_tracker_pages",
    "list_tracker_settings",
    "open_senders",
    "prepare_store",
    "probe_table",
    "read_step",
    "recorded_probes",
    "retry_registry_call",
    "update_trackers",
]
