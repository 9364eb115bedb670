"""Plugins looked at beside a server: whatever their import does, the server serves on."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import IO

import click

from rlx.errors import RlxError
from rlx.home import REGISTRY
from rlx.text import escape_unprintable

__all__ = ["watch_plugin_health"]

PATIENCE = 60.0
"""Seconds in which every plugin has to be imported."""
DONE = "recorded"
"""The child's last word: a plugin may end the process with any code."""


@contextmanager
def watch_plugin_health(url: str, patience: float = PATIENCE) -> Iterator[None]:
    """Records how the plugins of this machine fare, in a process of its own while the block lasts.

    What keeps it from that is said in a line on stderr.

    Args:
        url: of the registry; it may hold a password, and stands on no command line.
        patience: seconds until the process is killed.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, REGISTRY: url},
        )
        leaving = Event()
        watch = Thread(
            target=_watch_health_process, args=(process, said, patience, leaving), daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            leaving.set()
            _kill_process_group(process)
            watch.join()


def _watch_health_process(
    process: "subprocess.Popen[bytes]", said: IO[bytes], patience: float, leaving: Event
) -> None:
    try:
        code = process.wait(patience)
        said.seek(0)
        *_, last = ["nothing was said", *said.read().decode(errors="replace").splitlines()]
        why = f"it ended with code {code}: {last.removeprefix('error: ')}"
        done = last == DONE
    except subprocess.TimeoutExpired:
        _kill_process_group(process)
        why, done = f"it took more than {patience:g} s", False
    if not done and not leaving.is_set():
        click.echo(
            f"warning: how plugins fare is not recorded: {escape_unprintable(why)}", err=True
        )


def _kill_process_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process, and what it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run_health_process() -> int:
    from rlx.cli.plugins.health import record_health

    signal.alarm(int(PATIENCE) + 5)  # where nobody is left to kill it
    try:
        record_health(os.environ[REGISTRY], lambda plugin: print(f"at {plugin}", flush=True))
    except RlxError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
    print(DONE, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_run_health_process())
