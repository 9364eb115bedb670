"""Sends what a run writes to the object store of its home, while the run is supervised."""

import threading
import time
from collections.abc import Callable

from rlx.home import RunFolder
from rlx.reporting import print_to_log
from rlx.sealing import MANIFEST
from rlx_registry import StoredFolder, StoreError

__all__ = ["StoreThread"]

EVERY = 30.0
"""Seconds from one sending to the next, unless there is a new checkpoint."""
SHARE = 10
"""The next sending without a new checkpoint waits so many times as long as the last one took."""
LOOK = 0.5
"""Seconds between two looks for a new checkpoint."""
FINAL_TRIES = 4
BEAT = 10.0
"""Seconds between two heartbeats while the rest is sent."""


class StoreThread:
    """Sends a run's folder whenever there is a new checkpoint, and now and then; does nothing if
    its home is not in an object store.

    A store that cannot be reached does not end the run: what is missing is sent later.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._stored = StoredFolder.find(folder.root)
        self._ended = threading.Event()
        self._behind: str | None = None
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        if self._stored is not None:
            self._thread.start()

    def end(self, meanwhile: Callable[[], None]) -> str | None:
        """Sends the rest; returns why the copy is incomplete, or None.

        Args:
            meanwhile: called every `BEAT` seconds until that is done.
        """
        if self._stored is None:
            return None
        self._ended.set()
        last = threading.Thread(target=self._finish, name="store", daemon=True)
        last.start()
        while last.is_alive():
            last.join(BEAT)
            meanwhile()
        return self._behind and f"{self._behind}; `rlx sync` sends the rest"

    def _finish(self) -> None:
        self._thread.join()
        for attempt in range(FINAL_TRIES):
            if attempt:
                time.sleep(2**attempt)
            self._behind = self._send()
            if self._behind is None:
                return

    def leave(self) -> None:
        """Stops sending."""
        self._ended.set()
        if self._stored is not None:
            self._thread.join()

    def send_end(self) -> None:
        """Sends what was recorded of the run's end."""
        if self._stored is not None:
            self._send()

    def _run(self) -> None:
        before: list[str] = []
        due = time.monotonic() + EVERY
        while not self._ended.wait(LOOK):
            there, begin = self._list_checkpoints(), time.monotonic()
            if there == before and begin < due:
                continue
            if self._send() is None:
                before = there
            else:
                self._ended.wait(EVERY)
            now = time.monotonic()
            due = now + max(EVERY, SHARE * (now - begin))

    def _send(self) -> str | None:
        """Sends what has changed; returns why it could not."""
        assert self._stored is not None
        try:
            self._stored.send(own=True)
        except (StoreError, OSError) as error:
            print_to_log(f"store: {error}")
            return str(error)
        return None

    def _list_checkpoints(self) -> list[str]:
        """Names of the run's complete checkpoints."""
        found = self._folder.checkpoints.glob(f"step_*/{MANIFEST}")
        return sorted(path.parent.name for path in found)
