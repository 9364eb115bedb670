from .differences import find_run_differences
from .mirror import MlflowMirror, is_mirror_behind
from .mlflow_client import MirrorClient, MirrorUnavailableError
from .mlflow_store import ensure_store
from .mlflow_ui import require_free_port, ui_command
from .probes import StoredPoint, probe_table, read_probe, recorded_probes
from .recorder import Recorder
from .retry import retry_registry_call
from .rollout_reader import StoredStep, read_step
from .rollouts import Role, TrainedRows, get_stored_score_name

__all__ = [
    "MirrorClient",
    "MirrorUnavailableError",
    "MlflowMirror",
    "Recorder",
    "Role",
    "StoredPoint",
    "StoredStep",
    "TrainedRows",
    "ensure_store",
    "find_run_differences",
    "get_stored_score_name",
    "is_mirror_behind",
    "probe_table",
    "read_probe",
    "read_step",
    "recorded_probes",
    "require_free_port",
    "retry_registry_call",
    "ui_command",
]
