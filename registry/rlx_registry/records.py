"""Frozen records that the registry returns, detached from the database.

Times are seconds since the epoch, UTC. Paths are relative to the run's directory. Dictionaries are
plain JSON; in measurements (`metrics`, `statistics`, `rewards`, `scores`, `payload`) None stands
for a value that was not finite.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rlx_registry.plugin_records import fill_plugin_options
from rlx_registry.supervisors import is_supervisor_alive

Status = Literal["queued", "submitted", "running", "finished", "failed", "stopped", "lost"]
STATUSES: tuple[Status, ...] = get_args(Status)
ENDED: frozenset[str] = frozenset({"finished", "failed", "stopped", "lost"})
"""Statuses of runs that do not run, and will not unless they are resumed."""
LIVING: frozenset[str] = frozenset({"submitted", "running"})
"""Statuses that hold only while the run sends heartbeats."""
Request = Literal["stop", "kill"]
REQUESTS: tuple[Request, ...] = get_args(Request)
LABELS = ("before", "after", "step")

RESUMED = "resumed"
"""Reason for which a user has a run resumed, which restarts its attempt count."""
HEARTBEAT_LIMIT = 120.0
"""Seconds without a heartbeat after which a run of another machine counts as lost."""

PREVIEW_LENGTH = 160
"""Characters of a turn that its index row stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """What lists of runs show of one run, as it was when it was read.

    Attributes:
        digest: of the spec without name, seed, devices and tracking; with `seed` it identifies
            what the run computes.
        status: as recorded; `effective_status` also considers its supervisor. A "queued" run waits
            for a worker and has no supervisor; a "submitted" run has one, which may be waiting for
            devices.
        step: last completed step. `steps_total` is None until the run knows it.
        started: when it first ran. `ended`: when it last ended; None while it runs.
        reason: why it has its status, if that needs an explanation.
        attempt: number of starts; 0 before the first.
        host, pid: the machine and the process of its supervisor.
        request: pending request to its supervisor; see `Registry.leave_request`.
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
    phase: str | None
    attempt: int
    heartbeat: float | None
    host: str | None
    pid: int | None
    request: Request | None
    directory: str | None

    @property
    def is_silent(self) -> bool:
        """Whether its last sign of life is older than `HEARTBEAT_LIMIT`."""
        return time.time() - (self.heartbeat or self.started or self.created) > HEARTBEAT_LIMIT

    @property
    def effective_status(self) -> Status:
        """`status`, or "lost" if a living run has no supervisor, as its machine sees, or is silent
        on another."""
        if self.status not in LIVING:
            return self.status
        alive = is_supervisor_alive(self.directory)
        return "lost" if alive is False or (alive is None and self.is_silent) else self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(RunRow):
    """The whole record of a run.

    Attributes:
        yaml: the file as submitted; `spec` is the resolved experiment.
        origins: where each value of `spec` was set, by dotted path; None if not recorded.
    """

    yaml: str
    spec: dict[str, Any]
    plugins: list[dict[str, Any]]
    code: dict[str, Any]
    environment: dict[str, Any]
    mlflow_run_id: str | None
    mlflow_experiment_id: str | None
    origins: dict[str, str] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """`spec` with the options that its plugins had, defaults included."""
        return fill_plugin_options(self.spec, self.plugins)


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A request for devices of one machine: the first `count` of `names` that are free."""

    host: str
    names: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class StartedAttempt:
    """A newly started attempt of a run, the fencing token for `Registry.as_writer`, and its
    devices."""

    attempt: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device of a machine, and the attempt that has held it since `at`."""

    host: str
    name: str
    run_id: str
    attempt: int
    at: float


@dataclass(frozen=True, slots=True)
class StatusChange:
    """One change of a run's status; `before` is None for the submission."""

    at: float
    before: Status | None
    after: Status
    reason: str | None
    attempt: int


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event of a run. Ids increase, so the id also serves as a cursor."""

    id: int
    at: float
    kind: str
    level: str
    message: str
    payload: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric value as a tracker reads it. Rewriting a value gives it a new, larger `seq`."""

    seq: int
    name: str
    step: int
    value: float
    at: float


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """Metrics over the `n` problems of a held-out set, evaluated at a step."""

    step: int
    label: Literal["before", "after", "step"]
    suite: str
    n: int
    metrics: dict[str, Any]
    payload: dict[str, Any] | None
    at: float


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A complete checkpoint; the writer of the checkpoint defines what `sha256` covers."""

    step: int
    path: str
    bytes: int
    sha256: str
    at: float


@dataclass(frozen=True, slots=True)
class ArtifactRecord:
    """A file that trackers are sent. Adding a path again gives it a new, larger `seq`."""

    seq: int
    path: str
    kind: str
    at: float


@dataclass(frozen=True, slots=True)
class BodyRecord:
    """The file that holds the rollouts of a step, and the statistics of their batch."""

    path: str
    sha256: str
    bytes: int
    statistics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIndex:
    """The index entry of one trained row; the step's rollout file holds everything else.

    Attributes:
        row: row of the step's batch, from 0; `parent_row` is the row this one continues.
        tree, group: rows of a tree share a prompt; rows of a group are compared with each other.
        turn: "answer", "confidence", ...
        reward: weighted total, None if absent; `rewards` are the raw values by name.
        scores: values of the whole row by name, such as `total_score`.
        preview: the first `PREVIEW_LENGTH` characters of the turn; untrusted text.
        failed: why a scorer or parser failed on it, if one did.
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
