"""Runs remembered: an SQL registry of runs, their states and what they reported.

Imports nothing of rlx. Alembic is imported only when a database is made or upgraded, pyarrow only
when a body is written or read.

    with Registry.open("sqlite:///runs.db") as registry:
        run, created = registry.submit(digest=..., seed=0, name="rlcr", ...)
        registry.add_metrics(run.id, step=1, values={"loss": 0.5})
"""

from rlx_registry.errors import (
    Ambiguous,
    BodyError,
    Busy,
    Fenced,
    JournalError,
    NotFound,
    RegistryDatabaseError,
    SchemaError,
    Unavailable,
    Unwritable,
)
from rlx_registry.journal_import import journal_of
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
    Imported,
    MetricRow,
    PluginRecord,
    RolloutIndex,
    RunRecord,
    RunRow,
    Started,
    Status,
    StatusChange,
)
from rlx_registry.registry import Registry
from rlx_registry.rollout_files import read_body, read_trees, trees_that_say, write_body

__all__ = [
    "ENDED",
    "HEARTBEAT_LIMIT",
    "STATUSES",
    "Ambiguous",
    "ArtifactRecord",
    "BodyError",
    "BodyRecord",
    "Busy",
    "CheckpointRecord",
    "Curve",
    "DeviceRecord",
    "DeviceRequest",
    "EvaluationRecord",
    "EventRecord",
    "Fenced",
    "Imported",
    "JournalError",
    "MetricRow",
    "NotFound",
    "PluginRecord",
    "Registry",
    "RegistryDatabaseError",
    "RolloutIndex",
    "RolloutQuery",
    "RunRecord",
    "RunRow",
    "SchemaError",
    "Started",
    "Status",
    "StatusChange",
    "Unavailable",
    "Unwritable",
    "journal_of",
    "read_body",
    "read_trees",
    "trees_that_say",
    "write_body",
]
