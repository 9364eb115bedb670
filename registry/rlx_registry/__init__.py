"""An SQL registry of training runs: their status, metrics, events, evaluations and rollouts.

The package does not import rlx. It imports Alembic only to create or upgrade a database, and
pyarrow only to write or read a rollout file.

    with Registry.open("sqlite:///runs.db") as registry:
        run, created = registry.submit(digest=..., seed=0, name="rlcr", ...)
        registry.add_metrics(run.id, step=1, values={"loss": 0.5})
"""

from rlx_registry.errors import (
    AmbiguousNameError,
    BodyError,
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    DevicesBusyError,
    FencedError,
    JournalError,
    NotFoundError,
    RegistryDatabaseError,
    SchemaError,
)
from rlx_registry.journal_import import find_journal
from rlx_registry.queries import Curve, RolloutQuery
from rlx_registry.records import (
    ENDED,
    HEARTBEAT_LIMIT,
    STATUSES,
    ArtifactRecord,
    BodyRecord,
    CheckpointRecord,
    DeviceRecord,
    DeviceRequest,
    EvaluationRecord,
    EventRecord,
    ImportedRun,
    MetricRow,
    PluginRecord,
    RolloutIndex,
    RunRecord,
    RunRow,
    StartedAttempt,
    Status,
    StatusChange,
)
from rlx_registry.registry import Registry
from rlx_registry.rollout_files import read_body, read_trees, search_body_trees, write_body
from rlx_registry.rollout_records import (
    RewardRecord,
    RowRecord,
    ScoreRecord,
    SegmentRecord,
    TreeRecord,
    build_arrow_type,
    get_token_values,
    token_streams,
)
from rlx_registry.supervisors import forget_supervisor, is_supervisor_alive, record_supervisor

__all__ = [
    "ENDED",
    "HEARTBEAT_LIMIT",
    "STATUSES",
    "AmbiguousNameError",
    "ArtifactRecord",
    "BodyError",
    "BodyRecord",
    "CheckpointRecord",
    "Curve",
    "DatabaseUnavailableError",
    "DatabaseUnwritableError",
    "DeviceRecord",
    "DeviceRequest",
    "DevicesBusyError",
    "EvaluationRecord",
    "EventRecord",
    "FencedError",
    "ImportedRun",
    "JournalError",
    "MetricRow",
    "NotFoundError",
    "PluginRecord",
    "Registry",
    "RegistryDatabaseError",
    "RewardRecord",
    "RolloutIndex",
    "RolloutQuery",
    "RowRecord",
    "RunRecord",
    "RunRow",
    "SchemaError",
    "ScoreRecord",
    "SegmentRecord",
    "StartedAttempt",
    "Status",
    "StatusChange",
    "TreeRecord",
    "build_arrow_type",
    "find_journal",
    "forget_supervisor",
    "get_token_values",
    "is_supervisor_alive",
    "read_body",
    "read_trees",
    "record_supervisor",
    "search_body_trees",
    "token_streams",
    "write_body",
]
