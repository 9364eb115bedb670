"""An experiment of a small model from its start to its end.

    python tests/gpu/whole_run.py NAME cuda|cpu [KEY=VALUE...]

Prints figures of every twentieth step as they come, and evaluations.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from figures import print_figure
from follow import follow_run
from profiles import EXPERIMENTS

import rlx

EVERY = 20


def main(name: str, device: str, *overrides: str) -> None:
    """Runs it."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["RLX_HOME"] = home
        sets = (f"runner.device={device}", "tracking.mlflow=null", *overrides)
        experiment = rlx.read(EXPERIMENTS / f"{name}.yaml", *sets)
        began = time.monotonic()
        follow_run(experiment.submit(), every=EVERY)
        print_figure("whole run", seconds=time.monotonic() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
