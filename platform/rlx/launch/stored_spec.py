"""The experiment in a run's folder, which its supervisor and its ranks read."""

import json
import os

from rlx.home import RunFolder
from rlx.spec import ExperimentSpec

__all__ = ["load_resolved_spec", "put_spec"]


def put_spec(folder: RunFolder, spec: ExperimentSpec) -> None:
    """Writes atomically the experiment that ranks read."""
    aside = folder.resolved_spec.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(spec.dump_resolved(), indent=2))
    aside.replace(folder.resolved_spec)


def load_resolved_spec(folder: RunFolder) -> ExperimentSpec:
    """Reads the experiment of a run."""
    return ExperimentSpec.from_record(json.loads(folder.resolved_spec.read_text()))
