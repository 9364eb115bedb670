"""Checks plugins in a separate process, so that their imports cannot harm a server."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import IO

from rlx.cli.output import print_text
from rlx.errors import RlxError
from rlx.home import REGISTRY
from rlx.text import escape_unprintable

__all__ = ["watch_plugin_health"]

PATIENCE = 60.0
"""Seconds within which all plugins must be imported."""
DONE = "recorded"
"""Last line of the child's output; its exit code proves nothing, since a plugin may set any."""


@contextmanager
def watch_plugin_health(url: str, patience: float = PATIENCE) -> Iterator[None]:
    """Records the state of this machine's plugins, in a separate process while the block runs.

    A failure to do so is reported in a line on stderr.

    Args:
        url: URL of the registry; it may hold a password, so it is on no command line.
        patience: seconds until the process is killed.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, REGISTRY: url},
        )
        leaving = Event()
        watch = Thread(
            target=_watch_health_process, args=(process, output, patience, leaving), daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            leaving.set()
            _kill_process_group(process)
            watch.join()


def _watch_health_process(
    process: "subprocess.Popen[bytes]", output: IO[bytes], patience: float, leaving: Event
) -> None:
    try:
        code = process.wait(patience)
        output.seek(0)
        *_, last = ["no output", *output.read().decode(errors="replace").splitlines()]
        why = f"it ended with code {code}: {last.removeprefix('error: ')}"
        done = last == DONE
    except subprocess.TimeoutExpired:
        _kill_process_group(process)
        why, done = f"it took more than {patience:g} s", False
    if not done and not leaving.is_set():
        print_text(f"warning: plugin health is not recorded: {escape_unprintable(why)}", err=True)


def _kill_process_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process and its children."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run_health_process() -> int:
    from rlx.cli.plugins.health import record_health

    signal.alarm(int(PATIENCE) + 5)  # in case the parent has died
    try:
        record_health(os.environ[REGISTRY], lambda plugin: print(f"at {plugin}", flush=True))
    except RlxError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
    print(DONE, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_run_health_process())
