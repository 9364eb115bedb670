"""Where runs live: everything under RLX_HOME, one folder per run."""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunFolder", "home", "tracking_url"]


def home() -> Path:
    """RLX_HOME, or `.rlx` in the current folder, absolute."""
    return Path(os.environ.get("RLX_HOME", ".rlx")).absolute()


def tracking_url(url: str) -> str:
    """A URL of the `tracking:` section with `{home}` filled in."""
    return url.replace("{home}", str(home()))


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    root: Path

    @property
    def yaml(self) -> Path:
        """The experiment as submitted."""
        return self.root / "spec.yaml"

    @property
    def resolved(self) -> Path:
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
    def failure(self) -> Path:
        """Why a rank gave up, in its own words."""
        return self.root / "failure.json"

    @property
    def model(self) -> Path:
        """The trained model in the Hugging Face layout."""
        return self.root / "model"

    @property
    def pictures(self) -> Path:
        """Reliability diagram and learning curves."""
        return self.root / "pictures"

    def rollouts(self, step: int) -> Path:
        """The bodies of one step."""
        return self.root / "rollouts" / f"step_{step:06d}.parquet"
