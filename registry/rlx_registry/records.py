"""What the registry hands out: frozen records, never rows or live objects.

Times are seconds since the epoch, UTC. Paths are relative to the run's directory. Dictionaries are
plain JSON; in measured ones (`metrics`, `statistics`, `rewards`, `scores`, `payload`) None stands
for a figure that was not finite.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

__all__ = [
    "ENDED",
    "HEARTBEAT_LIMIT",
    "PREVIEW_LENGTH",
    "STATUSES",
    "ArtifactRecord",
    "BodyRecord",
    "CheckpointRecord",
    "DeviceRecord",
    "DeviceRequest",
    "EvaluationRecord",
    "EventRecord",
    "ImportedRun",
    "MetricRow",
    "PluginRecord",
    "RolloutIndex",
    "RunRecord",
    "RunRow",
    "StartedAttempt",
    "Status",
    "StatusChange",
]

Status = Literal["queued", "submitted", "running", "finished", "failed", "stopped", "lost"]
STATUSES: tuple[Status, ...] = get_args(Status)
ENDED: frozenset[str] = frozenset({"finished", "failed", "stopped", "lost"})
"""What a run is once nothing of it runs, and nothing will unless somebody asks."""
LIVING: frozenset[str] = frozenset({"submitted", "running"})
"""What a run is only while it shows signs of life."""
Request = Literal["stop", "kill"]
REQUESTS: tuple[Request, ...] = get_args(Request)
HEALTH = ("ok", "broken", "clash")
LABELS = ("before", "after", "step")

HEARTBEAT_LIMIT = 120.0
"""Seconds of silence after which readers take a run that has not ended for lost."""

PREVIEW_LENGTH = 160
"""Characters of a turn that its index row keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run as it stood when it was read.

    Attributes:
        id: "r-0001", "r-0002", ...
        digest: of the spec, without name, seed, devices and tracking; with `seed` it is the run.
        status: as recorded; `effective_status` also knows about silence. "queued" waits for a
            worker and has no supervisor; "submitted" has one, which may be waiting for devices.
        step: last completed step. `steps_total` is None until the run knows it.
        started: when it first ran. `ended`: when it last ended; None while it runs.
        reason: why it has its status, where that needs saying.
        directory: absolute path of the run's own folder.
        yaml: the file as submitted; `spec` is what it resolved to.
        attempt: how often it has started; 0 before the first time.
        heartbeat: last sign of life.
        host, pid: the machine and the process of its supervisor.
        request: what its supervisor is asked to do, where it is asked; see `Registry.ask`.
        origins: who said each value of `spec`, by dotted path; None where nobody wrote that down.
    """

    id: str
    name: str
    digest: str
    seed: int
    status: Status
    step: int
    steps_total: int | None
    created: float
    started: float | None
    ended: float | None
    reason: str | None
    directory: str | None
    yaml: str
    spec: dict[str, Any]
    plugins: list[dict[str, Any]]
    code: dict[str, Any]
    environment: dict[str, Any]
    mlflow_run_id: str | None
    mlflow_experiment_id: str | None
    attempt: int
    heartbeat: float | None
    pid: int | None
    phase: str | None
    host: str | None
    request: Request | None
    origins: dict[str, str] | None = None

    @property
    def effective_status(self) -> Status:
        """`status`, or "lost" for a run that should live and was silent for `HEARTBEAT_LIMIT`."""
        return _compute_effective_status(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """What a list of runs shows of one; see `RunRecord`."""

    id: str
    name: str
    digest: str
    seed: int
    status: Status
    step: int
    steps_total: int | None
    created: float
    started: float | None
    ended: float | None
    reason: str | None
    phase: str | None
    attempt: int
    heartbeat: float | None
    host: str | None
    pid: int | None
    request: Request | None
    directory: str | None

    @property
    def effective_status(self) -> Status:
        """As `RunRecord.effective_status`."""
        return _compute_effective_status(self)


def _compute_effective_status(run: RunRecord | RunRow) -> Status:
    if run.status not in LIVING:
        return run.status
    last = run.heartbeat or run.started or run.created
    return "lost" if time.time() - last > HEARTBEAT_LIMIT else run.status


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Devices that a run needs of one machine: any `count` of `names`, the first that are free.

    Raises:
        ValueError: a name is there twice, or there are fewer names than are asked for.
    """

    host: str
    names: tuple[str, ...]
    count: int

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"a device of {self.host} is named twice: {', '.join(self.names)}")
        if not 0 <= self.count <= len(self.names):
            raise ValueError(f"{self.host} has {len(self.names)} devices, not {self.count}")


@dataclass(frozen=True, slots=True)
class StartedAttempt:
    """An attempt that begins.

    Attributes:
        attempt: the fencing token for `Registry.as_writer`.
        devices: names of the devices that it holds, in the order of the request.
    """

    attempt: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device of a machine, and the attempt of a run that holds it since `at`."""

    host: str
    name: str
    run_id: str
    attempt: int
    at: float


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """How a plugin of a machine fared when it was last looked at.

    Attributes:
        state: "ok", "broken" (it cannot be imported, or breaks a promise) or "clash" (another
            distribution has one of that name).
        message: why, or how many promises it was seen to keep; "" where it was imported alone.
    """

    host: str
    kind: str
    distribution: str
    name: str
    version: str
    entry_point: str
    state: Literal["ok", "broken", "clash"]
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run that was looked for in a folder's journal.

    Attributes:
        created: whether it was made now; False where the registry knew it.
        formerly: its id when the journal began.
        left_out: what could not be read of the journal, in words.
    """

    run: RunRecord
    created: bool
    formerly: str
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StatusChange:
    """One step in a run's history; `before` is None for the submission."""

    at: float
    before: Status | None
    after: Status
    reason: str | None
    attempt: int


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something worth telling about a run. `id` grows, so it is also a cursor."""

    id: int
    at: float
    kind: str
    level: str
    message: str
    payload: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One value as a mirror reads it. Writing a value again gives it a new, larger `seq`."""

    seq: int
    name: str
    step: int
    value: float
    at: float


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """Figures over `n` held-out problems of a suite, taken at a step."""

    step: int
    label: Literal["before", "after", "step"]
    suite: str
    n: int
    metrics: dict[str, Any]
    payload: dict[str, Any] | None
    at: float


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A complete checkpoint; `sha256` is of whatever its writer digests, by its own rule."""

    step: int
    path: str
    bytes: int
    sha256: str
    at: float


@dataclass(frozen=True, slots=True)
class ArtifactRecord:
    """A file worth mirroring. Adding a path again gives it a new, larger `seq`."""

    seq: int
    path: str
    kind: str
    at: float


@dataclass(frozen=True, slots=True)
class BodyRecord:
    """Where the rollouts of a step are kept, and the statistics of their batch."""

    path: str
    sha256: str
    bytes: int
    statistics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIndex:
    """What SQL knows of one trained row; everything else is in the step's body.

    Attributes:
        row: row of the step's batch, from 0; `parent_row` is the row this one continues.
        tree, group: who shares a prompt, and who is compared with whom.
        turn: "answer", "confidence", ...
        reward: weighted total, None where it is absent; `rewards` are the raw values by name.
        scores: figures of the whole row by name, such as `total_score`.
        preview: the first `PREVIEW_LENGTH` characters of the turn; untrusted text.
        failed: why a scorer or parser gave up on it, if one did.
    """

    row: int
    parent_row: int | None
    tree: int
    group: int
    turn: str
    problem_id: str
    reward: float | None
    rewards: dict[str, float | None] = field(default_factory=dict)
    scores: dict[str, float | None] = field(default_factory=dict)
    advantage: float
    n_tokens: int
    finish_reason: str
    preview: str
    failed: str | None = None
