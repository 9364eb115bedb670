"""Builds the commands that start a run's ranks, and assigns ranks to machines.

A single local rank is started directly; otherwise one torchrun per machine starts that machine's
ranks. Machines are numbered in hostfile order, or by Slurm. The first one is the supervisor's own
and has rank 0, which records. torchrun's `c10d` rendezvous would number the machines by name, so
rlx uses the static rendezvous with the address of the first machine.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.spec import HostsLauncherSpec, LocalLauncherSpec, RunnerSpec, SlurmLauncherSpec
from rlx.spec.reading import Diagnostic, SourceLocation, build_error

__all__ = [
    "HostSlots",
    "build_torchrun_command",
    "check_hostfile",
    "free_port",
    "is_alone",
    "list_rank_hosts",
    "rank_command",
    "rank_environment",
    "ranks_here",
    "write_end_reason",
]

_PATH = ("runner", "launcher", "hostfile")
_LINE = re.compile(r"(?P<name>[^\s#]+)\s+slots=(?P<slots>[1-9]\d*)\s*(#.*)?")


class HostSlots(NamedTuple):
    """A host and its maximum number of ranks."""

    name: str
    slots: int


def rank_command(runner: RunnerSpec, folder: RunFolder, run_id: str) -> list[str]:
    """The command whose process starts all ranks of an attempt and ends with them."""
    if not isinstance(runner.launcher, LocalLauncherSpec):
        return [sys.executable, "-m", "rlx.launch.multi_node", str(folder.root), run_id]
    if is_alone(runner):
        return [sys.executable, "-m", "rlx.launch.rank", str(folder.root), run_id]
    return build_torchrun_command(["--standalone"], runner.ranks, folder.root, run_id)


def rank_environment(runner: RunnerSpec) -> dict[str, str]:
    """The environment variables that torchrun would set, for a rank started without it."""
    if not is_alone(runner):
        return {}
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any port: no peer connects


def is_alone(runner: RunnerSpec) -> bool:
    """Whether a run has a single rank on the supervisor's machine, which needs no launcher."""
    return isinstance(runner.launcher, LocalLauncherSpec) and runner.ranks == 1


def build_torchrun_command(
    place: Iterable[str], ranks: int, folder: Path, run_id: str
) -> list[str]:
    """The torchrun command for one machine's ranks; `place` holds its rendezvous options."""
    command = [sys.executable, "-m", "torch.distributed.run", *place]
    return [*command, f"--nproc-per-node={ranks}", "-m", "rlx.launch.rank", str(folder), run_id]


def ranks_here(runner: RunnerSpec) -> int:
    """Number of ranks on the supervisor's machine; 0 if Slurm chooses the machine.

    Raises:
        EnvironmentFault: there is a hostfile, and `list_rank_hosts` rejects it.
    """
    if isinstance(runner.launcher, SlurmLauncherSpec):
        return 0
    return (
        list_rank_hosts(runner)[0].slots
        if isinstance(runner.launcher, HostsLauncherSpec)
        else runner.ranks
    )


def list_rank_hosts(runner: RunnerSpec) -> list[HostSlots]:
    """Hosts that get ranks, in hostfile order; `slots` is the number of ranks that each gets.

    Raises:
        EnvironmentFault: the hostfile cannot be read or parsed here, has too few slots, or begins
            with another machine.
    """
    assert isinstance(runner.launcher, HostsLauncherSpec)
    for fault in check_hostfile(runner):
        raise EnvironmentFault(fault.message)
    hosts, _ = _read_hostfile(Path(runner.launcher.hostfile))
    left, dealt = runner.ranks, []
    for host in hosts:
        if left:
            dealt.append(host._replace(slots=min(host.slots, left)))
            left -= dealt[-1].slots
    return dealt


def check_hostfile(runner: RunnerSpec) -> Iterator[Diagnostic]:
    """Yields the errors in a hostfile, with their lines."""
    if not isinstance(runner.launcher, HostsLauncherSpec):
        return
    hosts, faults = _read_hostfile(Path(runner.launcher.hostfile))
    faults = faults or _check_host_slots(hosts, runner)
    yield from faults
    if not faults and not _is_local_host(hosts[0].name):
        message = f"the first host, {hosts[0].name}, is not this machine"
        help_ = "submit there, or list this machine first: it runs the supervisor and rank 0"
        yield build_error(_PATH, message, help_, kind="machine")


def write_end_reason(folder: RunFolder, message: str, exit_code: int, *, again: bool) -> None:
    """Writes the file that tells the supervisor why ranks ended; an existing reason is kept."""
    if not folder.failure.exists():
        reason = {"message": message, "exit_code": exit_code, "again": again}
        aside = folder.failure.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        aside.write_text(json.dumps(reason))
        aside.replace(folder.failure)


def free_port() -> int:
    """Returns a port that is free at the moment."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _read_hostfile(path: Path) -> tuple[list[HostSlots], list[Diagnostic]]:
    """Parses a hostfile into its hosts and the errors in its lines."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        return [], [build_error(_PATH, f"cannot read {path}: {reason}", kind="file")]
    hosts: dict[str, HostSlots] = {}
    faults = []
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        found = _LINE.fullmatch(stripped)
        if found is not None and found["name"] not in hosts and not found["name"].startswith("-"):
            hosts[found["name"]] = HostSlots(found["name"], int(found["slots"]))
            continue
        message = "a hostfile line must read NAME slots=N"
        if found is not None and found["name"] in hosts:
            message = f"{found['name']} appears twice in the hostfile"
        place = SourceLocation(str(path), number, line.index(stripped) + 1, len(stripped), line)
        faults.append(Diagnostic(kind="value", message=message, path=_PATH, position=place))
    return list(hosts.values()), faults


def _check_host_slots(hosts: list[HostSlots], runner: RunnerSpec) -> list[Diagnostic]:
    slots = sum(host.slots for host in hosts)
    if slots >= runner.ranks:
        return []
    assert isinstance(runner.launcher, HostsLauncherSpec)
    message = f"runner.ranks is {runner.ranks}, but {runner.launcher.hostfile} has {slots} slots"
    path = ("runner", "ranks")
    return [build_error(path, message, against=_PATH)]


def _is_local_host(name: str) -> bool:
    """Whether a host name resolves to this machine: only its own addresses can be bound."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as one:
            try:
                one.bind(address)
            except OSError:
                continue
            return True
    return False
