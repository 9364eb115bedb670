"""Runs one machine's ranks of a run on several: `python -m rlx.launch.node`, controlled by stdin.

The first line on standard input is a `NodeOrder` as JSON, which keeps secrets out of the process
list. Heartbeats from `rlx.launch.multi_node` follow, and possibly a request to stop. If they cease
because that process, its machine or the network is gone, the ranks here are ended as well, since
nobody would record their work. The ranks treat this process as their supervisor and exit without
it.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.home import RunFolder
from rlx.launch.launcher import NodeOrder, build_torchrun_command
from rlx.launch.leftovers import open_temporary_folder
from rlx.launch.log_lines import stamp_output
from rlx.stopwatch import Stopwatch

__all__ = ["STOP", "find_network_interface", "keep_failure", "main", "write_end_reason"]

STOP = b"stop\n"
SILENCE = 30.0
"""Seconds without a heartbeat after which the ranks are ended."""
GRACE = 30.0
"""Seconds that ranks have to exit after torchrun has."""
LOOK = 0.25


def main() -> int:
    """Runs this machine's ranks until they end or `rlx.launch.multi_node` is gone."""
    first = open(0, "rb", buffering=0, closefd=False).readline()  # noqa: SIM115
    if not first:
        return 1
    order: NodeOrder = json.loads(first)
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))
    adopt_orphans()
    with open_temporary_folder(RunFolder(Path(order["folder"]))) as temporary:
        return _run_ranks(order, temporary, stop_signals)


def write_end_reason(folder: RunFolder, message: str, exit_code: int, *, again: bool) -> None:
    """Writes the file that tells the supervisor why ranks ended; an existing reason is kept."""
    keep_failure(folder, {"message": message, "exit_code": exit_code, "again": again})


def keep_failure(folder: RunFolder, failure: Mapping[str, Any]) -> None:
    """Writes a failure in the format of `rlx.launch.rank.write_failure`, for the supervisor; an
    existing one is kept."""
    if not folder.failure.exists():
        aside = folder.failure.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        aside.write_text(json.dumps(failure))
        aside.replace(folder.failure)


def _run_ranks(order: NodeOrder, temporary: Mapping[str, str], stop_signals: list[int]) -> int:
    """Starts this machine's ranks and waits for them; returns the exit code."""
    try:
        command, environment = _build_node_command(order)
        ranks = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=order["cwd"],
            env={**environment, **temporary},
        )
    except OSError as error:
        message = f"the ranks on {socket.gethostname()} cannot start: {error}"
        print(message, file=sys.stderr, flush=True)
        write_end_reason(RunFolder(Path(order["folder"])), message, 4, again=True)
        return 1
    try:
        code = _watch_ranks(ranks, stop_signals)
        # Written before the ranks are ended, or their peers would blame the network.
        if code < 0 and not stop_signals:
            name = f"{signal.Signals(-code).name}, on {socket.gethostname()}"
            message = f"torchrun was killed by signal {-code} ({name})"
            write_end_reason(RunFolder(Path(order["folder"])), message, 1, again=True)
    finally:
        for process in _list_own_processes():
            with suppress(psutil.Error):
                process.kill()
        kill_descendants()
    return code if code >= 0 else 128 - code


def _build_node_command(order: NodeOrder) -> tuple[list[str], dict[str, str]]:
    """Builds the command that starts the ranks, and its environment."""
    node, address = order["node"], order["address"]
    if node is None or address is None:
        node, address = int(os.environ["SLURM_NODEID"]), os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    place = [f"--nnodes={order['nodes']}", f"--node-rank={node}", "--rdzv-backend=static"]
    place += [f"--master-addr={address}", f"--master-port={order['port']}"]
    environment = {**os.environ, **order["environment"], "RLX_SUPERVISOR": str(os.getpid())}
    if interface := find_network_interface(address):
        # gloo uses the address of the host name, which may not resolve or may be loopback.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return build_torchrun_command(
        place, order["ranks"], Path(order["folder"]), order["run_id"]
    ), environment


def find_network_interface(address: str) -> str | None:
    """The network interface through which this machine reaches an address."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as one:
        one.connect(target)  # sends nothing
        mine = one.getsockname()[0]
    named = {
        each.address.split("%")[0]: name
        for name, found in psutil.net_if_addrs().items()
        for each in found
    }
    return named.get(mine)


def _watch_ranks(ranks: "subprocess.Popen[bytes]", stop_signals: list[int]) -> int:
    """Waits for torchrun to end, or ends it; returns its exit code."""
    silence, stop_requested = Stopwatch(4 * LOOK), False
    while ranks.poll() is None:
        if select.select([0], [], [], LOOK)[0]:
            received = os.read(0, 4096)
            if not received:
                return _kill_ranks(ranks, "the process that started this run is gone")
            silence.restart()
            stop_requested |= STOP in received
        if silence.look() > SILENCE:
            return _kill_ranks(
                ranks, f"no heartbeat from the run's first machine for {SILENCE:g} s"
            )
        if stop_requested and not stop_signals:  # Slurm signals every process itself
            stop_signals.append(signal.SIGTERM)
            ranks.terminate()
    waited = Stopwatch(4 * LOOK)
    while stop_signals and any(_list_own_processes()) and waited.look() < GRACE:
        time.sleep(LOOK)
    return ranks.returncode


def _kill_ranks(ranks: "subprocess.Popen[bytes]", why: str) -> int:
    with suppress(OSError):  # the reader may be gone
        print(f"{socket.gethostname()}: {why}", file=sys.stderr, flush=True)
    ranks.kill()
    ranks.wait()
    return 1


def _list_own_processes() -> Iterator[psutil.Process]:
    """All processes started for this one, whatever their parent is now."""
    me: Any = str(os.getpid())
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RLX_SUPERVISOR") == me and process.is_running():
                yield process


if __name__ == "__main__":
    stamp_output()
    sys.exit(main())
