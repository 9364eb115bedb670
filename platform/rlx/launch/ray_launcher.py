"""The launcher `ray`: every rank is an actor of a Ray cluster whose nodes share RLX_HOME.

This module imports no Ray, so that experiments can be checked without it.
"""

import socket
import sys
from collections.abc import Iterator
from typing import ClassVar

from rlx.errors import EnvironmentFault
from rlx.home import RunFolder
from rlx.launch.launcher import Launcher
from rlx.launch.machine import list_packages
from rlx.spec import RayLauncherSpec
from rlx.spec.reading import Diagnostic, build_error

CONNECT_TIMEOUT = 5.0
"""Seconds in which a cluster's address must accept a connection."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""What Ray reads from the environment when it is imported."""

_PATH = ("runner", "launcher")


class RayLauncher(Launcher):
    """Starts each rank in an actor of a Ray cluster, through `rlx.launch.ray_ranks`."""

    reads_input: ClassVar[bool] = True

    def check(self) -> Iterator[Diagnostic]:
        ray = list_packages()["ray"]
        if not ray.fits:
            message = f"launcher ray needs the package ray{ray.range}, found {ray.installed}"
            yield build_error(_PATH, message, "pip install 'rlx[ray]'", kind="machine")
            return
        assert isinstance(self.runner.launcher, RayLauncherSpec)
        try:
            require_cluster(self.runner.launcher.address)
        except EnvironmentFault as fault:
            yield build_error((*_PATH, "address"), str(fault), kind="machine")

    def count_ranks_here(self) -> int:
        return 0

    def build_command(self, folder: RunFolder, run_id: str) -> list[str]:
        ranks = [sys.executable, "-m", "rlx.launch.ray_ranks", str(folder.root), run_id]
        return ["env", *(f"{name}={value}" for name, value in QUIET.items()), *ranks]


def require_cluster(address: str) -> None:
    """Tries whether something listens at a cluster's address: Ray itself would try for minutes.

    Raises:
        EnvironmentFault: nothing does.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentFault(f"no Ray cluster at {address}: {error}") from error
