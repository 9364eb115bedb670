"""File layout of runs: everything is under RLX_HOME, one folder per run."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from rlx.errors import EnvironmentFault

REGISTRY, ATTEMPT = "RLX_RUN_REGISTRY", "RLX_RUN_ATTEMPT"
"""Environment variables that pass the registry URL and the fencing token to supervisor and ranks.
The URL may contain a password, so it must not appear on a command line."""

DEFAULT_REGISTRY = "sqlite:///{home}/registry.db"
"""Where runs are registered if neither an experiment nor RLX_REGISTRY says."""

WARM_STARTS = "cache/warm_start"
"""Folder of the results of warm starts, below RLX_HOME."""

_SQLITE = "sqlite:///"


def get_rlx_home() -> Path:
    """RLX_HOME as an absolute path; `.rlx` in the current folder if it is unset or empty.

    Raises:
        EnvironmentFault: it is a URL.
    """
    named = os.environ.get("RLX_HOME") or ".rlx"
    if "://" in named:
        raise EnvironmentFault(
            f"RLX_HOME is {named}, and rlx keeps no runs in object stores: name a folder, on a "
            "shared disk if several machines use it"
        )
    return Path(os.path.expanduser(named)).absolute()  # noqa: PTH111  (the method may raise)


def locate_cache() -> Path:
    """The folder of this machine's own files of rlx: below XDG_CACHE_HOME, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(cache)  # noqa: PTH111  (the method may raise)
    return Path(folder, "rlx").absolute()


def format_path(path: Path) -> str:
    """The path as messages print it: relative if it is below the current folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def tracking_url(url: str) -> str:
    """A URL of the `tracking:` section with `{home}`, and `~` in SQLite's, filled in.

    Raises:
        EnvironmentFault: RLX_HOME contains characters that a database URL cannot.
    """
    if url.startswith(f"{_SQLITE}~"):
        path = os.path.expanduser(url.removeprefix(_SQLITE))  # noqa: PTH111  (the method may raise)
        return f"{_SQLITE}{path}"
    if "{home}" not in url:
        return url
    folder = str(get_rlx_home())
    if "?" in folder or unquote(folder) != folder:
        raise EnvironmentFault(
            f"RLX_HOME is {folder}: a path with '?' or '%' and two digits cannot be used in a "
            "database URL; choose another folder"
        )
    return url.replace("{home}", folder)


class _Below:
    """A file or folder at a path below a run's folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __get__(self, folder: "RunFolder", _: type) -> Path:
        return folder.root / self.path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    root: Path

    yaml = _Below("spec.yaml")
    """The experiment as submitted."""
    resolved_spec = _Below("spec.json")
    """The experiment with every default filled in, as JSON."""
    log = _Below("run.log")
    """Output of the supervisor and the ranks."""
    progress = _Below("progress.json")
    """Current activity, replaced several times a second."""
    job = _Below("job.json")
    """The job of the run in a job system; missing if its supervisor is no such job."""
    failure = _Below("failure.json")
    """The error of the first rank that failed."""
    memory_snapshot = _Below("memory.pickle")
    """What held a GPU's memory when a rank ran out of it, for pytorch.org/memory_viz."""
    reserve = _Below("reserve")
    """Disk space reserved for final messages; removed when the disk is full or the run ends."""
    checkpoints = _Below("checkpoints")
    """Checkpoints from which the run resumes after a crash."""
    origin = _Below("origin")
    """The checkpoint of another run from which this one starts, if any."""
    anyway = _Below("anyway")
    """There if the run trains even where its first contact shows no signal."""
    tokenizer = _Below("tokenizer")
    """The tokenizer of a tiny model that was chosen or trained at submission, if any."""
    model = _Below("model")
    """The trained model in the Hugging Face layout."""
    pictures = _Below("pictures")
    """Reliability diagram, learning curves and other plots."""

    def answers(self, rank: int = 0) -> Path:
        """What servers answered to the rewards of a rank; missing if they asked none."""
        return self.root / "answers" / f"{rank}.db"

    @property
    def has_room(self) -> bool:
        """Whether no process of the run has hit a full disk."""
        return self.reserve.exists()

    def probe(self, step: int) -> Path:
        return self.root / "probes" / f"step_{step:06d}.parquet"

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"step_{step:06d}.parquet"
