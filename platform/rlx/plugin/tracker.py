"""What a tracker promises: a service or a store that shows runs, such as MLflow.

The registry is the truth. The run's supervisor sends a tracker what it has not yet confirmed, in
the order of writing, in a thread that no run waits for; `rlx check --repair` sends the rest later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlx.plugin.base import Plugin, StrictModel


class TrackerPlugin(StrictModel, Plugin):
    """An entry of `tracking.trackers`, selected by the field `kind`.

    A subclass declares `kind: Literal["NAME"] = "NAME"`, with the name of its entry point.

    Attributes:
        implementation: "module:Class" of a `Tracker`, which is constructed with these settings.
    """

    implementation: ClassVar[str]

    kind: str


@dataclass(frozen=True, slots=True)
class TrackedPoint:
    """A value of a metric.

    Attributes:
        seq: place in the order of writing, from 1. Of several values of a metric at a step, only
            the newest exists, with the largest `seq`. 0 for a figure of an evaluation of which the
            run has no metric; it is sent with every end.
        name: in characters that every tracker takes: letters, digits and `_-./ :`, at most 250.
        value: finite.
        at: when it was written, in seconds since 1970.
    """

    seq: int
    name: str
    step: int
    value: float
    at: float


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What trackers show of a run beside its metrics. Passwords in URLs are replaced by `***`.

    Attributes:
        id: in its registry; runs of other registries may have the same.
        project: `tracking.experiment`.
        attempt: number of the attempt. A new one may repeat steps, with other values.
        status: `queued`, `submitted`, `running`, `finished`, `failed`, `lost` or `stopped`.
        created: seconds since 1970.
        began: when it was started, in seconds since 1970, or None.
        ended: seconds since 1970; of a lost run, when it was last heard of; else None.
        settings: the resolved experiment; `yaml` is it as it was submitted.
        identity: tags that no other run has, of any registry.
        tags: these and other facts about the run, such as `rlx.varied.PATH`.
        description: in Markdown, with a table of each evaluation.
        folder: of the run, where a tracker may keep what it needs; None if there is none.
        ids: what the registry keeps of `Tracker.ids`.
    """

    id: str
    name: str
    seed: int
    project: str
    attempt: int
    status: str
    created: float
    began: float | None
    ended: float | None
    settings: Mapping[str, Any]
    yaml: str
    identity: Mapping[str, str]
    tags: Mapping[str, str]
    description: str
    groups: Sequence[str]
    folder: Path | None
    ids: Mapping[str, str | None]


class Tracker:
    """One run in one tracker. Not thread-safe.

    Every method may raise any exception: nothing is lost, and it is called again later, by this
    process or another one. A process that was killed may have done any part of its work.

    Attributes:
        title: name for messages, such as `MLflow`.
        label: where runs go, for messages; the same for all runs of one server or store.
        ids: what the registry is to keep of this run: MLflow's alone, for its links.
    """

    title: str

    def __init__(self, settings: Any) -> None:
        """Keeps the settings of the tracker's `TrackerPlugin`; connects to nothing."""
        self.settings = settings
        self.label = self.title
        self.ids: Mapping[str, str | None] = {}

    def open_run(self, run: TrackedRun) -> int | None:
        """Finds or creates the run and describes it; called once per attempt, and before the end.

        A tracker that cannot change a value may drop what it has and be sent everything again.

        Returns:
            The largest `seq` that the tracker has, after which it is sent the rest, 0 if it has no
            metrics; None if it has all that it has confirmed.
        """
        raise NotImplementedError

    def add_points(self, points: Sequence[TrackedPoint]) -> bool:
        """Adds values in the order of `seq`, some of which it may have been sent before; False if
        the tracker lacks the run, or has dropped values that it cannot change: the run is to be
        started again."""
        raise NotImplementedError

    def finish(self, run: TrackedRun, files: Sequence[tuple[Path, str]]) -> None:
        """Adds the end of a run, and files, each with its path in the run's folder, where a file
        may be missing. A run that has ended may be resumed, evaluated, and ended again."""

    def has_run(self, run: TrackedRun) -> bool:
        """Whether it still has a run that has ended."""
        return True

    def discard(self, run: TrackedRun) -> None:
        """Deletes the run, as far as the tracker deletes; does nothing if it has no such run."""

    def find_page(self, run: TrackedRun) -> str | None:
        """Returns the address that shows the run, or the command that does; None if there is none.
        Connects to nothing."""
        return None
