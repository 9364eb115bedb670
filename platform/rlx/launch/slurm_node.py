"""Starts one machine's ranks of a Slurm job: `python -m rlx.launch.slurm_node FOLDER RUN_ID RANKS
NODES PORT`, as srun does on every node.

torchrun brings the ranks of all nodes together at the job's first node. Each rank takes this
process for its supervisor, and exits without it.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.home import RunFolder
from rlx.launch.failures import write_failure_reason
from rlx.launch.launcher import build_torchrun_command
from rlx.launch.processes import (
    LauncherInput,
    find_network_interface,
    open_temporary_folder,
    stamp_output,
)

POLL_INTERVAL = 0.25
"""Seconds between two polls of torchrun."""
STOP_GRACE = 30.0
"""Seconds that ranks which were asked to stop have to exit after torchrun has."""


def main(folder: str, run_id: str, ranks: str, nodes: str, port: str) -> int:
    """Runs this machine's ranks until they end, or the supervisor ends them."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    adopt_orphans()
    address = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    place = [f"--nnodes={nodes}", f"--node-rank={os.environ['SLURM_NODEID']}"]
    place += ["--rdzv-backend=static", f"--master-addr={address}", f"--master-port={port}"]
    command = build_torchrun_command(place, int(ranks), Path(folder), run_id)
    paths = RunFolder(Path(folder))
    with open_temporary_folder(paths) as temporary:
        return _run_torchrun(command, _build_environment(address, temporary), paths, signals)


def _build_environment(address: str, temporary: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **temporary, "RLX_SUPERVISOR": str(os.getpid())}
    if interface := find_network_interface(address):
        # gloo uses the address of the host name, which may not resolve or may be loopback.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def _run_torchrun(
    command: list[str], environment: Mapping[str, str], folder: RunFolder, signals: list[int]
) -> int:
    given, is_told = LauncherInput(), False
    torchrun = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
    )
    try:
        while torchrun.poll() is None and not given.is_closed:
            given.receive(POLL_INTERVAL)
            # Slurm signals every process of a job itself, and torchrun takes one signal only.
            if given.stop and not signals and not is_told:
                is_told = True
                torchrun.terminate()
        code = torchrun.poll()
        if code is not None and code < 0 and not (signals or is_told):
            # Before the ranks are ended, or their peers would blame the network.
            name = f"{signal.Signals(-code).name}, on {socket.gethostname()}"
            why = f"torchrun was killed by signal {-code} ({name})"
            write_failure_reason(folder, why, again=True)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(torchrun.pid, signal.SIGKILL)
        torchrun.wait()
        kill_descendants(0.0 if given.is_closed else STOP_GRACE if signals or is_told else 0.0)
    if code is None:
        return 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    stamp_output()
    sys.exit(main(*sys.argv[1:]))
