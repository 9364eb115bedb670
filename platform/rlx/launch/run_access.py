"""Opens the registry of runs by its URL, converts its errors to those of rlx, and finds runs."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from rlx.errors import EnvironmentFault, RegistryError, RlxError, SpecError
from rlx.home import DEFAULT_REGISTRY, RunFolder, format_path, get_rlx_home, tracking_url
from rlx.launch.failures import convert_to_rlx_error, describe_error
from rlx.launch.processes import signal_ranks
from rlx.text import escape_unprintable
from rlx_registry import (
    ENDED,
    RESUMED,
    NoTablesError,
    NotFoundError,
    Registry,
    RegistryDatabaseError,
    RunRecord,
    Status,
    describe_lost_registry,
)

if TYPE_CHECKING:
    from rlx.spec import ExperimentSpec

KILLED = "its supervisor was gone"
"""Reason of a lost run for which none was recorded."""
BROKEN_OFF = "its submission was interrupted"
"""Reason of a lost run that was recorded, and never started."""
RUN_LIKE = re.compile(r"(r-)?[0-9]+|latest")
"""Arguments that name a run: its id, its number, or `latest`."""
_SQLITE = "sqlite:///"


def get_registry_url(url: str | None = None) -> str:
    """A registry's URL: the given one, RLX_REGISTRY, or the one in RLX_HOME."""
    return tracking_url(url or os.environ.get("RLX_REGISTRY") or DEFAULT_REGISTRY)


def _locate_sqlite_file(url: str) -> Path | None:
    return Path(unquote(url.removeprefix(_SQLITE))) if url.startswith(_SQLITE) else None


@contextmanager
def open_registry(url: str, *, read_only: bool = True) -> Iterator[Registry]:
    """Opens the registry; converts its errors to rlx errors with the right exit code.

    Raises:
        SpecError: there is no registry, or a named run does not exist.
        EnvironmentFault: its file system is full or read-only.
        RegistryError: the database cannot be read or written.
    """
    target = tracking_url(url)
    path = _locate_sqlite_file(target)
    if path is not None and not read_only:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot create the folder {path.parent}: {error.strerror}; set RLX_HOME to a "
                "writable folder"
            ) from error
    elif path is not None and not path.exists():
        why = describe_lost_registry(path) or (
            " yet: submit an experiment first, or name another folder with RLX_HOME"
        )
        raise SpecError(f"there is no registry of runs at {format_path(path)}{why}")
    try:
        with Registry.open(target, read_only=read_only) as registry:
            yield registry
    except RegistryDatabaseError as error:
        if isinstance(error, NoTablesError):
            raise SpecError(f"{error}; submit an experiment first") from error
        raise convert_to_rlx_error(error) or error from error


def create_missing_registry(url: str) -> None:
    """Creates an SQLite registry unless its file is there, so that pages can show it empty."""
    path = _locate_sqlite_file(tracking_url(url))
    if path is not None and not path.exists():
        with open_registry(url, read_only=False):
            pass


def is_spec_of_run(spec: "ExperimentSpec", run: RunRecord) -> bool:
    """Whether an experiment is a run's, apart from what does not affect results."""
    from rlx.spec import ExperimentSpec

    if spec.seed != run.seed:
        return False
    return spec.digest == run.digest or spec.digest == ExperimentSpec.from_record(run.spec).digest


def require_same_data(run: RunRecord) -> None:
    """Checks that the files that a run's plugins read are as they were when it began.

    Raises:
        SpecError: a file has other records.
    """
    from rlx.discovery import describe_data_changes, list_plugin_records, resolve_plugins
    from rlx.spec import ExperimentSpec

    try:
        spec = ExperimentSpec.from_record(run.spec)
        records = list_plugin_records(spec, resolve_plugins(spec))
    except (RlxError, ValueError):
        return  # which is the run's to say
    changes = dict.fromkeys(describe_data_changes(records, run.plugins))
    if changes:
        raise SpecError(
            f"{run.id} cannot go on with other data. {'; '.join(changes)}. Restore them, or begin "
            f"a new run: rlx submit SPEC, with --from-checkpoint {run.id}@latest if it has one"
        )


def locate_run_folder(run: RunRecord) -> RunFolder:
    """Returns the folder of a run.

    Raises:
        RegistryError: the run was recorded, but its folder was never created.
    """
    if run.directory is None:
        raise RegistryError(f"run {run.id} has no folder: {BROKEN_OFF}")
    return RunFolder(Path(run.directory))


def list_group_runs(registry: Registry, name: str) -> list[str]:
    """Returns the ids of a group's runs, in the order in which they joined it.

    Raises:
        SpecError: there is no such group; the message suggests the most similar name.
    """
    groups = registry.groups()
    if name not in groups:
        from rlx.spec.reading import did_you_mean

        near = did_you_mean(name, groups)
        hint = f"; did you mean {escape_unprintable(near)!r}?" if near else ""
        there = hint or ("" if groups else ": there are none yet")
        raise SpecError(f"there is no group {escape_unprintable(name)!r}{there}")
    return groups[name]


def end_orphaned_run(registry: Registry, run: RunRecord, status: Status, reason: str) -> bool:
    """Ends a run whose supervisor is gone, and terminates the ranks that it left behind.

    Returns:
        False if the run changed its status in the meantime; nothing is done then.
    """
    if not registry.transition(run.id, {run.status}, status, reason):
        return False
    if run.directory is None:
        return True
    folder = RunFolder(Path(run.directory))
    signal_ranks(folder.root, signal.SIGTERM)
    if registry.run(run.id).status in ENDED:  # no other process has taken the run over
        folder.reserve.unlink(missing_ok=True)
    return True


@contextmanager
def fail_unless_started(registry: Registry, run_id: str) -> Iterator[None]:
    """Marks a run as failed if the code that should start it raises."""
    try:
        yield
    except Exception as error:
        rlx_error = convert_to_rlx_error(error)
        code = 1 if rlx_error is None else rlx_error.exit_code
        with suppress(RegistryDatabaseError):  # the original error is more useful
            if directory := registry.run(run_id).directory:
                RunFolder(Path(directory)).reserve.unlink(missing_ok=True)
            why = describe_error(error)
            registry.results.add_event(run_id, "failed", why, {"exit_code": code}, "error")
            registry.transition(run_id, {"queued", "submitted"}, "failed", why)
        raise


def attempts_used(registry: Registry, run_id: str) -> int:
    """Number of attempts since a run was submitted, or last resumed by a user."""
    changes = registry.history(run_id)
    before = [change.attempt for change in changes if change.reason == RESUMED]
    return changes[-1].attempt - (before[-1] if before else 0)


def find_runs(registry: Registry, ids: Iterable[str]) -> list[RunRecord]:
    """Reads the runs that nobody has removed in the meantime."""
    runs = []
    for run_id in ids:
        with suppress(NotFoundError):
            runs.append(registry.run(run_id))
    return runs


def get_run_exit_code(registry: Registry, run: RunRecord) -> int | None:
    """Returns the exit code of following the run to its end; None while it has not ended."""
    return choose_run_exit_code(run, registry.queries.failures([run.id]))


def choose_run_exit_code(run: RunRecord, failures: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Returns what `get_run_exit_code` does, from the result of `Queries.failures`."""
    if run.status == "finished":
        return 0
    if run.effective_status != "failed":
        return 1 if run.effective_status in ("stopped", "lost") else None
    return int(failures.get(run.id, {}).get("exit_code", 1))


def put_spec(folder: RunFolder, spec: "ExperimentSpec") -> None:
    """Writes atomically the experiment that ranks read."""
    aside = folder.resolved_spec.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(spec.dump_resolved(), indent=2))
    aside.replace(folder.resolved_spec)


def load_resolved_spec(folder: RunFolder) -> "ExperimentSpec":
    """Reads the experiment of a run."""
    from rlx.spec import ExperimentSpec

    return ExperimentSpec.from_record(json.loads(folder.resolved_spec.read_text()))


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed of one run.

    Attributes:
        whole: the whole run, with its records and its copies in trackers.
        rollouts: its stored rollouts and their index.
        files: files and folders of this machine, none inside another.
        mlflow: id of the MLflow run that is moved to MLflow's trash; None if there is none.
        trackers: kinds of the trackers that delete what they have of it, MLflow among them.
    """

    run: RunRecord
    whole: bool
    rollouts: bool
    files: tuple[Path, ...]
    bytes: int
    mlflow: str | None
    trackers: tuple[str, ...]


def plan_removal(run: RunRecord, *, rollouts: bool = False, checkpoints: bool = False) -> Removal:
    """Lists what a removal of rollouts or checkpoints would delete, or of the whole run if neither
    is named. The trained model is no checkpoint.

    Raises:
        SpecError: the run has not ended.
    """
    from rlx.record import list_deleting_trackers

    if run.effective_status not in ENDED:
        raise SpecError(f"{run.id} is {run.effective_status}: stop it first, rlx stop {run.id}")
    whole = not (rollouts or checkpoints)
    trackers = list_deleting_trackers(run) if whole else []
    mlflow = run.mlflow_run_id if "mlflow" in trackers else None
    root = RunFolder(Path(run.directory or ""))
    parts = [root.rollouts(0).parent.name] * rollouts
    parts += [root.checkpoints.name, root.origin.name] * checkpoints
    places = [root.root] * whole + [root.root / part for part in parts] if run.directory else []
    if mlflow is not None:
        places += (get_rlx_home() / "mlartifacts").glob(f"*/{mlflow}")
    files = tuple(path for path in places if path.exists())
    return Removal(
        run=run,
        whole=whole,
        rollouts=whole or rollouts,
        files=files,
        bytes=sum(
            each.lstat().st_size
            for path in files
            for each in (path, *path.rglob("*"))
            if not each.is_dir()
        ),
        mlflow=mlflow,
        trackers=tuple(kind for kind in trackers if kind != "mlflow" or mlflow is not None),
    )


def remove_run_data(registry: Registry, removal: Removal) -> None:
    """Removes what `plan_removal` listed: first from trackers, then from the registry, then files.

    Raises:
        TrackerUnavailableError: a tracker cannot be reached; the registry has the run still.
        SpecError: the run has been started again.
        OSError: a file cannot be removed.
    """
    from rlx.record import open_senders

    run = registry.run(removal.run.id)
    has_ended = run.attempt == removal.run.attempt and run.effective_status in ENDED
    if has_ended and run.status not in ENDED:  # it is lost, which nobody has recorded yet
        has_ended = registry.transition(run.id, {run.status}, "lost", KILLED, seen=run)
    if not has_ended:
        raise SpecError(f"{run.id} has been started again: nothing of it was removed")
    for sender in open_senders(registry, run):
        if sender.kind in removal.trackers:
            sender.discard()
    if removal.whole:
        registry.delete_run(run.id)
    elif removal.rollouts:
        registry.delete_rollouts(run.id)
    for path in removal.files:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
