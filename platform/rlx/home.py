"""Where runs live: everything under RLX_HOME, one folder per run."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from rlx.errors import EnvironmentFault

__all__ = ["ATTEMPT", "REGISTRY", "RunFolder", "format_path", "get_rlx_home", "tracking_url"]

REGISTRY, ATTEMPT = "RLX_RUN_REGISTRY", "RLX_RUN_ATTEMPT"
"""Variables by which supervisor and ranks learn of the registry, whose URL may hold a password and
must not be seen in a list of processes, and of their fencing token."""


def get_rlx_home() -> Path:
    """RLX_HOME, or `.rlx` in the current folder where that is unset or empty; absolute."""
    return Path(os.environ.get("RLX_HOME") or ".rlx").absolute()


def format_path(path: Path) -> str:
    """A path as messages name it: relative where it lies below the current folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def tracking_url(url: str) -> str:
    """A URL of the `tracking:` section with `{home}` filled in.

    Raises:
        EnvironmentFault: RLX_HOME has a name that cannot stand in a URL.
    """
    if "{home}" not in url:
        return url
    folder = str(get_rlx_home())
    if "?" in folder or unquote(folder) != folder:
        raise EnvironmentFault(
            f"RLX_HOME is {folder}: with '?' or '%' and two digits it cannot stand in a database "
            "URL; choose another folder"
        )
    return url.replace("{home}", folder)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    root: Path

    @property
    def yaml(self) -> Path:
        """The experiment as submitted."""
        return self.root / "spec.yaml"

    @property
    def resolved_spec(self) -> Path:
        """The experiment with every default filled in, as JSON."""
        return self.root / "spec.json"

    @property
    def log(self) -> Path:
        """What supervisor and ranks print."""
        return self.root / "run.log"

    @property
    def progress(self) -> Path:
        """What is being done right now, replaced several times a second."""
        return self.root / "progress.json"

    @property
    def job(self) -> Path:
        """The job of Slurm that has the run; not there where its supervisor is none."""
        return self.root / "job.json"

    @property
    def failure(self) -> Path:
        """Why the first rank that failed gave up, in its own words."""
        return self.root / "failure.json"

    @property
    def reserve(self) -> Path:
        """Space for the run's last words; gone once the disk was full, or the run has ended."""
        return self.root / "reserve"

    @property
    def has_room(self) -> bool:
        """Whether nobody has met a full disk."""
        return self.reserve.exists()

    @property
    def checkpoints(self) -> Path:
        """What the run goes on from after a crash."""
        return self.root / "checkpoints"

    @property
    def origin(self) -> Path:
        """The checkpoint of another run that this one goes on from, if there is one."""
        return self.root / "origin"

    @property
    def model(self) -> Path:
        """The trained model in the Hugging Face layout."""
        return self.root / "model"

    @property
    def pictures(self) -> Path:
        """Reliability diagram and learning curves."""
        return self.root / "pictures"

    def probe(self, step: int) -> Path:
        """The samples of the probe of one step."""
        return self.root / "probes" / f"step_{step:06d}.parquet"

    def rollouts(self, step: int) -> Path:
        """The bodies of one step."""
        return self.root / "rollouts" / f"step_{step:06d}.parquet"
