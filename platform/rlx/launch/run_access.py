"""Opens the registry of runs by its URL, converts its errors to those of rlx, and finds runs."""

import json
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import rlx.errors
import rlx_registry
from rlx.home import DEFAULT_REGISTRY, RunFolder, format_path, tracking_url
from rlx.launch.failures import convert_to_rlx_error
from rlx.launch.processes import list_live_ranks
from rlx.text import escape_unprintable
from rlx_registry import ENDED, NotFoundError, Registry, RunRecord, Status

if TYPE_CHECKING:  # slow to import, and lists of runs need none of it
    from rlx.spec import ExperimentSpec

__all__ = [
    "BROKEN_OFF",
    "KILLED",
    "RUN_LIKE",
    "choose_run_exit_code",
    "create_missing_registry",
    "end_orphaned_run",
    "find_runs",
    "get_registry_url",
    "get_run_exit_code",
    "is_spec_of_run",
    "list_group_runs",
    "load_resolved_spec",
    "locate_run_folder",
    "open_registry",
    "put_spec",
]

KILLED = "its supervisor was gone"
"""Reason of a lost run for which none was recorded."""
BROKEN_OFF = "its submission was interrupted"
"""Reason of a lost run that was recorded, and never started."""
RUN_LIKE = re.compile(r"(r-)?[0-9]+|latest")
"""Arguments that name a run: its id, its number, or `latest`."""


def get_registry_url(url: str | None = None) -> str:
    """Returns a registry's URL: the given one, RLX_REGISTRY, or the one in RLX_HOME."""
    return tracking_url(url or os.environ.get("RLX_REGISTRY") or DEFAULT_REGISTRY)


@contextmanager
def open_registry(url: str, *, read_only: bool = True) -> Iterator[Registry]:
    """Opens the registry; converts its errors to rlx errors with the right exit code.

    Raises:
        SpecError: there is no registry, or a named run does not exist.
        EnvironmentFault: its file system is full or read-only.
        RegistryError: the database cannot be read or written.
    """
    try:
        target = _prepare_registry_file(tracking_url(url), read_only)
        with Registry.open(target, read_only=read_only) as registry:
            yield registry
    except rlx_registry.NoTablesError as error:
        if target.startswith("sqlite:///"):  # somebody else's file
            raise convert_to_rlx_error(error) or error from error
        raise rlx.errors.SpecError(f"{error}; submit an experiment first") from error
    except rlx_registry.RegistryDatabaseError as error:
        raise convert_to_rlx_error(error) or error from error


def create_missing_registry(url: str) -> None:
    """Creates an SQLite registry unless its file is there, so that pages can show it empty.

    Raises:
        EnvironmentFault: its folder cannot be written.
        RegistryError: the database cannot be created.
    """
    target = tracking_url(url)
    path = Path(unquote(target.removeprefix("sqlite:///")))
    if target.startswith("sqlite:///") and not path.exists():
        with open_registry(url, read_only=False):
            pass


def _prepare_registry_file(url: str, read_only: bool) -> str:
    if not url.startswith("sqlite:///"):
        return url
    path = Path(unquote(url.removeprefix("sqlite:///")))
    if read_only and not path.exists():
        if lost := rlx_registry.describe_lost_registry(path):
            raise rlx.errors.SpecError(f"there is no registry of runs at {format_path(path)}{lost}")
        raise rlx.errors.SpecError(
            f"there is no registry of runs at {format_path(path)} yet: submit an experiment "
            "first, or name another folder with RLX_HOME"
        )
    if not read_only:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise rlx.errors.EnvironmentFault(
                f"cannot create the folder {path.parent}: {error.strerror}; set RLX_HOME to a "
                "writable folder"
            ) from error
    return url


def is_spec_of_run(spec: "ExperimentSpec", run: RunRecord) -> bool:
    """Whether an experiment is a run's, apart from what does not affect results."""
    from rlx.spec import ExperimentSpec

    if spec.digest == run.digest:
        return spec.seed == run.seed
    recorded = ExperimentSpec.from_record(run.spec)
    return (spec.digest, spec.seed) == (recorded.digest, run.seed)


def locate_run_folder(run: RunRecord) -> RunFolder:
    """Returns the folder of a run.

    Raises:
        RegistryError: the run was recorded, but its folder was never created.
    """
    if run.directory is None:
        raise rlx.errors.RegistryError(f"run {run.id} has no folder: {BROKEN_OFF}")
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
        raise rlx.errors.SpecError(f"there is no group {escape_unprintable(name)!r}{there}")
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
    for pid in list_live_ranks(folder.root):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    if registry.run(run.id).status in ENDED:  # no other process has taken the run over
        folder.reserve.unlink(missing_ok=True)
    return True


def find_runs(registry: Registry, ids: Iterable[str]) -> list[RunRecord]:
    """Reads the runs that nobody has removed in the meantime."""
    runs = []
    for run_id in ids:
        with suppress(NotFoundError):
            runs.append(registry.run(run_id))
    return runs


def get_run_exit_code(registry: Registry, run: RunRecord) -> int | None:
    """Returns the exit code of following the run to its end; None while it has not ended."""
    is_failed = run.effective_status == "failed"
    return choose_run_exit_code(run, registry.lists.failures([run.id]) if is_failed else {})


def choose_run_exit_code(run: RunRecord, failures: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Returns what `get_run_exit_code` does, from the result of `RunLists.failures`."""
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
