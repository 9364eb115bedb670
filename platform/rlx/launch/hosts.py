"""The launcher `hosts`: ranks on the machines of a hostfile, through ssh.

Machines are numbered in hostfile order. The first one is the supervisor's own and has rank 0, which
records. torchrun's `c10d` rendezvous would number the machines by name, so rlx uses the static
rendezvous with the address of the first machine.
"""

import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlx.errors import EnvironmentFault
from rlx.launch.launcher import MultiNodeLauncher, NodeOrder, NodeSession
from rlx.plugin import expand_path
from rlx.spec import HostsLauncherSpec, RunnerSpec
from rlx.spec.reading import Diagnostic, SourceLocation, build_error

__all__ = ["HostsLauncher"]

SSH = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5")
"""ssh gives up after three keepalives, one every five seconds, without an answer."""

_PATH = ("runner", "launcher", "hostfile")
_LINE = re.compile(r"(?P<name>[^\s#]+)\s+slots=(?P<slots>[1-9]\d*)\s*(#.*)?")


class HostSlots(NamedTuple):
    """A host and its maximum number of ranks."""

    name: str
    slots: int


class HostsLauncher(MultiNodeLauncher):
    """Starts ranks on the machines of a hostfile, in order."""

    @property
    def settings(self) -> HostsLauncherSpec:
        """The section `runner.launcher`."""
        assert isinstance(self.runner.launcher, HostsLauncherSpec)
        return self.runner.launcher

    def check(self) -> Iterator[Diagnostic]:
        """Yields the errors in the hostfile, with their lines."""
        hosts, faults = _read_hostfile(expand_path(self.settings.hostfile))
        faults = faults or _check_host_slots(hosts, self.runner, self.settings.hostfile)
        yield from faults
        if not faults and not _is_local_host(hosts[0].name):
            message = f"the first host, {hosts[0].name}, is not this machine"
            help_ = "submit there, or list this machine first: it runs the supervisor and rank 0"
            yield build_error(_PATH, message, help_, kind="machine")

    def count_ranks_here(self) -> int:
        return self._list_rank_hosts()[0].slots

    def list_sessions(self, order: NodeOrder, node: list[str]) -> Iterator[NodeSession]:
        hosts = self._list_rank_hosts()
        for number, host in enumerate(hosts):
            own: NodeOrder = {
                **order,
                "nodes": len(hosts),
                "address": hosts[0].name,
                "node": number,
                "ranks": host.slots,
            }
            there = ["ssh", *self.settings.ssh, *SSH, host.name, f"exec {shlex.join(node)}"]
            yield NodeSession(host.name, there if number else node, own)

    def _list_rank_hosts(self) -> list[HostSlots]:
        """Hosts that get ranks, in hostfile order; `slots` is the number of ranks that each gets.

        Raises:
            EnvironmentFault: the hostfile cannot be read or parsed here, has too few slots, or
                begins with another machine.
        """
        for fault in self.check():
            raise EnvironmentFault(fault.message)
        hosts, _ = _read_hostfile(expand_path(self.settings.hostfile))
        left, dealt = self.runner.ranks, []
        for host in hosts:
            if left:
                dealt.append(host._replace(slots=min(host.slots, left)))
                left -= dealt[-1].slots
        return dealt


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


def _check_host_slots(
    hosts: list[HostSlots], runner: RunnerSpec, hostfile: str
) -> list[Diagnostic]:
    slots = sum(host.slots for host in hosts)
    if slots >= runner.ranks:
        return []
    message = f"runner.ranks is {runner.ranks}, but {hostfile} has {slots} slots"
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
