"""Watches whether the head of the Ray cluster that this process has joined still answers.

Without its head a cluster starts nothing, but what runs goes on until Ray ends it, by default after
60 seconds. A head whose state is kept elsewhere may return; any other is that of a new cluster,
even at the same address. Ray must not be asked about nodes meanwhile: it would abort this process.
"""

import os
import time
from collections.abc import Callable
from typing import NoReturn

from rlx.errors import EnvironmentFault
from rlx.launch.ray_launcher import REACH, connect_to_cluster
from rlx.stopwatch import Stopwatch

__all__ = ["HeadLostError", "HeadWatch"]

LOOK = 1.0
"""Seconds between two looks."""
RAY_PATIENCE, DEFAULT = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
"""Ray's setting of the seconds that its processes go on without a head, and its default."""


class HeadLostError(Exception):
    """The head of the cluster is gone, and the cluster with it."""


class HeadWatch:
    """Looks for the head of the cluster that this process has joined.

    It waits half as long as Ray, so that the ranks are ended, and the reason is known, before Ray
    ends this process.

    Args:
        address: HOST:PORT of the head.
        log: prints a line to the run's log.
        report: called with why the head is lost, before that is raised.

    Raises:
        RayError: it does not answer now.
    """

    def __init__(
        self, address: str, log: Callable[[str], None], report: Callable[[str], None]
    ) -> None:
        self._name, self._address = f"the head of the Ray cluster, {address},", address
        self._log, self._report = log, report
        self._patience = float(os.environ.get(RAY_PATIENCE, DEFAULT)) / 2
        self._cluster = _read_cluster_id(address)
        self._silence: Stopwatch | None = None
        self._is_replaced = False
        self._next = time.monotonic() + LOOK

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer the last look."""
        return self._silence is not None

    def check(self) -> None:
        """Looks once a second; calls in between do nothing.

        Raises:
            HeadLostError: it has not answered for long, or is the head of another cluster now.
        """
        if time.monotonic() < self._next:
            return
        why = self.find_loss()
        self._next = time.monotonic() + LOOK
        if self._silence is None or why is None:
            return
        if self._is_replaced or self._silence.look() >= self._patience:
            self._end(why)

    def require_answer(self) -> None:
        """Looks now, and does not wait.

        Raises:
            HeadLostError: it does not answer.
        """
        why = self.find_loss()
        if why is not None:
            self._end(why)

    def find_loss(self) -> str | None:
        """Looks now; says why the cluster is lost unless its head returns, None if it answers."""
        found = self._find_cluster()
        if found is None:
            if self._silence is None:
                self._silence = Stopwatch(REACH + 2 * LOOK)
                self._log(
                    f"{self._name} does not answer; what runs goes on without it for at most "
                    f"{self._patience:g} s"
                )
            return f"{self._name} was lost: it does not answer"
        if found != self._cluster:
            self._is_replaced = True
            return f"{self._name} was lost: a new cluster answers at its address"
        if self._silence is not None:
            self._silence = None
            self._log(f"{self._name} answers again")
        return None

    def _end(self, why: str) -> NoReturn:
        self._report(why)
        raise HeadLostError(why)

    def _find_cluster(self) -> str | None:
        """The id of the cluster whose head answers; None if none does."""
        from ray.exceptions import RayError

        try:
            connect_to_cluster(self._address)
            # A head that has always answered is the same one.
            return self._cluster if self._silence is None else _read_cluster_id(self._address)
        except (EnvironmentFault, RayError):
            return None


def _read_cluster_id(address: str) -> str:
    """The id of the cluster whose head has this address.

    Raises:
        RayError: it does not answer.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    return str(GcsClient(address=address).cluster_id.hex())
