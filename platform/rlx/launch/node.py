"""One machine's part of a run on several: `python -m rlx.launch.node`, with orders on its input.

The first line is what to start, as JSON. So nothing secret stands in a list of processes. What
follows are heartbeats from `rlx.launch.multi_node`, and maybe a request to stop. When they cease,
because that process, its machine or the network is gone, the ranks here end as well: nobody would
record what they do. Ranks take this process for their supervisor, and leave without it.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import psutil

from rlx.home import RunFolder
from rlx.launch.launchers import build_torchrun_command, write_end_reason

__all__ = ["STOP", "NodeOrder", "main"]

STOP = b"stop\n"
SILENCE = 30.0
"""Seconds without a sign of life after which the ranks are ended."""
GRACE = 30.0
"""Seconds that ranks have to end, once torchrun has."""
LOOK = 0.25


class NodeOrder(TypedDict):
    """What a machine is to start.

    `node` is its number and `address` that of machine 0; None where Slurm tells them.
    """

    folder: str
    run_id: str
    cwd: str
    node: int | None
    nodes: int
    ranks: int
    address: str | None
    port: int
    environment: dict[str, str]


def main() -> int:
    """Runs this machine's ranks until they end, or whoever ordered them is gone."""
    first = open(0, "rb", buffering=0, closefd=False).readline()  # noqa: SIM115
    if not first:
        return 1
    order: NodeOrder = json.loads(first)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        command, environment = _build_node_command(order)
        ranks = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=order["cwd"],
            env=environment,
        )
    except OSError as error:
        message = f"the ranks on {socket.gethostname()} cannot start: {error}"
        print(message, file=sys.stderr, flush=True)
        write_end_reason(RunFolder(Path(order["folder"])), message, 4, again=True)
        return 1
    try:
        code = _watch_ranks(ranks, told)
        if (
            code < 0 and not told
        ):  # said before its ranks are ended, or their peers would blame the network
            name = f"{signal.Signals(-code).name}, on {socket.gethostname()}"
            message = f"torchrun was killed by signal {-code} ({name})"
            write_end_reason(RunFolder(Path(order["folder"])), message, 1, again=True)
    finally:
        for process in _list_own_processes():
            with suppress(psutil.Error):
                process.kill()
    return code if code >= 0 else 128 - code


def _build_node_command(order: NodeOrder) -> tuple[list[str], dict[str, str]]:
    """The command that starts the ranks, and its environment."""
    node, address = order["node"], order["address"]
    if node is None or address is None:
        node, address = int(os.environ["SLURM_NODEID"]), os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    place = [f"--nnodes={order['nodes']}", f"--node-rank={node}", "--rdzv-backend=static"]
    place += [f"--master-addr={address}", f"--master-port={order['port']}"]
    environment = {**os.environ, **order["environment"], "RLX_SUPERVISOR": str(os.getpid())}
    if interface := _find_network_interface(address):
        # gloo takes the address of the machine's own name, which may not resolve, or be local.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return build_torchrun_command(
        place, order["ranks"], Path(order["folder"]), order["run_id"]
    ), environment


def _find_network_interface(address: str) -> str | None:
    """The network interface by which this machine reaches an address."""
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


def _watch_ranks(ranks: "subprocess.Popen[bytes]", told: list[int]) -> int:
    """Waits for the end of torchrun, or ends it; returns its exit code."""
    heard, asked = time.monotonic(), False
    while ranks.poll() is None:
        if select.select([0], [], [], LOOK)[0]:
            said = os.read(0, 4096)
            if not said:
                return _kill_ranks(ranks, "whoever started this run is gone")
            heard = time.monotonic()
            asked |= STOP in said
        if time.monotonic() - heard > SILENCE:
            return _kill_ranks(ranks, f"nothing heard of the run's first machine for {SILENCE:g} s")
        if asked and not told:  # Slurm itself tells every process
            told.append(signal.SIGTERM)
            ranks.terminate()
    until = time.monotonic() + GRACE
    while told and any(_list_own_processes()) and time.monotonic() < until:
        time.sleep(LOOK)
    return ranks.returncode


def _kill_ranks(ranks: "subprocess.Popen[bytes]", why: str) -> int:
    with suppress(OSError):  # whoever would read it may be gone
        print(f"{socket.gethostname()}: {why}", file=sys.stderr, flush=True)
    ranks.kill()
    ranks.wait()
    return 1


def _list_own_processes() -> Iterator[psutil.Process]:
    """Everything that was started for this process, whoever its parent is now."""
    me: Any = str(os.getpid())
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RLX_SUPERVISOR") == me and process.is_running():
                yield process


if __name__ == "__main__":
    sys.exit(main())
