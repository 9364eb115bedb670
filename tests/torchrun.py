"""Starts a script of the tests on ranks of its own, as a launcher of rlx does."""

import json
import os
import subprocess
import sys
from pathlib import Path

from patience import stop_process

QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}


def start_ranks(count, script, *arguments, log):
    """Without a GPU. The script may import its neighbours and those of `tests/learner`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", str(script), *map(str, arguments)]
    roots = [str(Path(__file__).parent / "learner"), os.environ.get("PYTHONPATH", "")]
    beside = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, roots))}
    with log.open("w") as file:
        environment = {**os.environ, **QUIET, **beside}
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def run_ranks(count, script, folder):
    """Returns what the script has written into the folder that it is given, as `found.json`."""
    process = start_ranks(count, script, folder, log=folder / "log")
    try:
        assert process.wait() == 0, (folder / "log").read_text()[-4000:]
    finally:
        stop_process(process)
    return json.loads((folder / "found.json").read_text())
