"""Records a run and starts its supervisor, detached from the terminal.

A run's folder is complete before the run is recorded, in one transaction: a submission that is
killed leaves either no run, or one that can be resumed.
"""

import errno
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import count
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rlx
from rlx.checkpoint import copy_origin, pin_checkpoint
from rlx.discovery import ExperimentPlugins, list_plugin_records
from rlx.home import REGISTRY, RunFolder, get_rlx_home, tracking_url
from rlx.importing import source_digest
from rlx.launch.processes import child_environment, has_ended, this_machine
from rlx.launch.run_access import locate_run_folder, put_spec
from rlx.model import choose_run_vocabulary
from rlx.plugin_files import keep_for_runs
from rlx.spec import TrackingSpec
from rlx.spec.reading import LoadedSpec
from rlx_registry import (
    BLOCKING,
    ENDED,
    Registry,
    RunRecord,
    find_changed_plugins,
    record_supervisor,
)

UNRECORDED = ".unrecorded-"
"""Name prefix of folders of runs that are not recorded yet, or were never recorded."""
PACKAGES = ("torch", "deepspeed", "transformers", "mlflow", "sqlalchemy", "pydantic", "numpy")


def submit_run(
    registry: Registry,
    read: LoadedSpec,
    plugins: ExperimentPlugins,
    *,
    again: bool,
    queue: bool = False,
    anyway: bool = False,
) -> tuple[RunRecord, bool]:
    """Creates a run's folder and records the run, without starting it.

    Args:
        again: submit even if an identical run has finished or is active. A run under another name,
            or whose plugins were others, is not identical.
        queue: leave the run to whoever starts it.
        anyway: train even where the first contact of a pretrained model shows no signal.

    Returns:
        The run, or the identical one, and whether it is new.

    Raises:
        InvalidSpec: the checkpoint to start from is missing, damaged, or of another model.
    """
    read = pin_checkpoint(registry, read)
    spec = read.spec
    runs = get_rlx_home() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    submission: dict[str, Any] = {
        "digest": plugins.compute_digest(spec),
        "seed": spec.seed,
        "name": spec.name,
        "spec": spec.dump_resolved(),
        "yaml": read.document.whole_text,
        "plugins": list_plugin_records(spec, plugins),
        "code": collect_code_version(),
        "environment": collect_environment_versions(),
        "again": again,
        "queue": queue,
    }
    keep_for_runs(submission["spec"])
    _remove_unrecorded(runs)
    prefix = f"{UNRECORDED}{this_machine()}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=runs, prefix=prefix, ignore_cleanup_errors=True) as aside:
        staged = RunFolder(Path(aside) / "run")
        staged.root.mkdir()
        if (vocabulary := choose_run_vocabulary(spec, plugins)) is not None:
            vocabulary.save(staged.tokenizer)
        staged.yaml.write_text(read.document.whole_text)
        copy_origin(registry, spec, staged)
        put_spec(staged, spec)
        if anyway:
            staged.anyway.touch()
        with registry.write_atomically():
            run, created = registry.submit(**submission)
            if created:
                _record_folder(registry, run, read, _place_folder(staged.root, runs, run.id))
                for found in plugins.warnings:
                    registry.results.add_event(
                        run.id, "warning", found.message, found.to_json(), "warning"
                    )
    if anyway and not created and run.directory is not None and run.status not in ENDED:
        RunFolder(Path(run.directory)).anyway.touch()
    return registry.run(run.id), created


def describe_new_run(registry: Registry, run: RunRecord) -> str | None:
    """Why a run is new although an earlier one that counts has its spec and seed, or None."""
    earlier = [
        (find_changed_plugins(run.plugins, other.plugins), other)
        for other in registry.runs(digest=run.digest)
        if other.id != run.id and other.seed == run.seed and other.effective_status in BLOCKING
    ]
    if not earlier:
        return None
    changed, nearest = min(earlier, key=lambda pair: bool(pair[0]))
    if changed:
        return f"{', '.join(changed)} changed since {nearest.id}"
    if run.name != nearest.name:
        return f"{nearest.id} is the same experiment under the name {nearest.name}"
    return None


def _remove_unrecorded(runs: Path) -> None:
    for folder in runs.glob(f"{UNRECORDED}{this_machine()}-*"):
        pid = folder.name.removeprefix(f"{UNRECORDED}{this_machine()}-").partition("-")[0]
        if has_ended(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _record_folder(registry: Registry, run: RunRecord, read: LoadedSpec, folder: RunFolder) -> None:
    is_job = read.spec.runner.launcher.submits_jobs
    starter: dict[str, str | int] = {}
    if is_job or run.status == "submitted":  # until it is started, the run is this process's
        starter = {"pid": os.getpid(), "host": this_machine()}
        record_supervisor(folder.root, os.getpid())
    steps, origins = read.spec.steps, read.origins
    registry.update_run(
        run.id, directory=folder.root, steps_total=steps, origins=origins, **starter
    )
    for file in (folder.yaml, folder.resolved_spec):
        registry.results.add_artifact(run.id, file, "spec")
    for file in sorted(folder.tokenizer.glob("*.json")):
        registry.results.add_artifact(run.id, file, "tokenizer")


def _place_folder(staged: Path, runs: Path, run_id: str) -> RunFolder:
    """Renames a folder to one that no run uses, not even of another registry or a deleted one."""
    for number in count(1):
        folder = runs / (run_id if number == 1 else f"{run_id}.{number}")
        try:
            return RunFolder(staged.replace(folder))  # takes the place of an empty folder too
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
    raise AssertionError("there is always another number")


def start_supervisor(run: RunRecord, registry_url: str) -> int:
    """Starts the supervisor in its own session, so that it outlives the terminal.

    Returns:
        Its process id.
    """
    folder = locate_run_folder(run)
    with folder.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlx.launch.supervisor", run.id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**child_environment(), REGISTRY: registry_url},
        )
    record_supervisor(folder.root, process.pid)
    return process.pid


def collect_environment_versions() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _find_version(name) for name in PACKAGES},
    }


def collect_code_version() -> dict[str, Any]:
    """rlx's version, a digest of its sources, and its commit if it runs from a checkout."""
    root, described = Path(rlx.__file__).parent, ""
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    with suppress(FileNotFoundError):  # there is no git
        described = subprocess.run(
            ["git", "-C", str(root), *describe],
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        ).stdout.strip()
    return {
        "version": rlx.__version__,
        "sources": source_digest(root / "__init__.py")[:16],
        "commit": described.removesuffix("-dirty") or None,
        "modified": described.endswith("-dirty"),
    }


def registry_url(read: LoadedSpec) -> str:
    """URL of the experiment's registry: the spec's, or RLX_REGISTRY if the spec has the default."""
    written = read.spec.tracking.registry
    is_default = written == TrackingSpec().registry
    return tracking_url(os.environ.get("RLX_REGISTRY") or written if is_default else written)


@dataclass(frozen=True, slots=True)
class Package:
    """One requirement of rlx and its installed version.

    Attributes:
        range: versions that rlx was tested with, such as ">=2.11,<2.14"; "" for any.
        extra: the extra of rlx that requires it; "" for rlx itself.
        installed: installed version; None if it is not installed.
        fits: whether the installed version is in the range; False if it is not installed.
    """

    name: str
    range: str
    extra: str
    installed: str | None
    fits: bool

    @property
    def command(self) -> str:
        """The command that installs a version in the range."""
        return f"pip install '{self.name}{self.range}'"


_DEVELOPMENT = ("dev", "lint", "release", "system", "test")
"""Extras for work on rlx itself."""


@cache
def list_packages() -> Mapping[str, Package]:
    """Requirements of rlx on this platform by name, core before extras; development is left out."""
    found: dict[str, Package] = {}
    for requirement in map(Requirement, requires("rlx") or ()):
        name, extra, marker = canonicalize_name(requirement.name), "", requirement.marker
        if marker is not None and not marker.evaluate({"extra": ""}):
            named = re.search(r"extra == ['\"]([^'\"]+)", str(marker))
            if named is None or not marker.evaluate({"extra": named[1]}):
                continue  # for another platform
            extra = named[1]
        if name != "rlx" and extra not in _DEVELOPMENT:
            installed, range_ = _find_version(requirement.name), requirement.specifier
            fits = installed is not None and range_.contains(installed, prereleases=True)
            package = Package(requirement.name, str(range_), extra, installed, fits)
            found.setdefault(name, package)
    return found


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
