"""Records which plugins this machine can import, for the dashboard, which imports none itself."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import IO, Any, Literal

from rlx.cli.output import print_text
from rlx.cli.plugins.lookup import describe_plugin_state
from rlx.discovery import InstalledPlugin, list_installed_plugins
from rlx.errors import RlxError
from rlx.home import REGISTRY
from rlx.launch import open_registry, this_machine
from rlx.text import escape_unprintable
from rlx_registry import PluginRecord

Key = tuple[str, str, str]


def record_health(url: str, tell: Callable[[str], None] = lambda _: None) -> None:
    """Imports every installed plugin and records whether that succeeds.

    Results of `rlx plugins check` for the same version are kept, unless the import fails.

    Args:
        url: URL of the registry.
        tell: called with the name of each plugin before it is imported.

    Raises:
        RlxError: the registry cannot be written.
    """
    host = this_machine()
    rows = {
        _get_plugin_key(row): row
        for row in (_check_plugin_import(found, host, tell) for found in list_installed_plugins())
    }
    with open_registry(url, read_only=False) as registry:
        for known in registry.machines.plugins(host):
            row = rows.get(_get_plugin_key(known))
            if row is not None and known.message and row.state == "ok":
                same = (row.version, row.entry_point) == (known.version, known.entry_point)
                rows[_get_plugin_key(known)] = known if same else row
        registry.machines.put_plugins(host, list(rows.values()))


def record_promises(url: str, found: InstalledPlugin, entry: Mapping[str, Any]) -> None:
    """Records the result of `rlx plugins check` for an installed plugin.

    Raises:
        RlxError: the registry cannot be written.
    """
    promises = [promise["state"] for promise in entry["promises"]]
    broken = promises.count("broken")
    state: Literal["ok", "broken"] = "broken" if entry["exit_code"] else "ok"
    message = f"{promises.count('kept')} promises kept" + (f", {broken} broken" if broken else "")
    if "error" in entry:
        message = entry["error"]["message"]
    host = this_machine()
    row = _build_plugin_record(found, host, state, message)
    with open_registry(url, read_only=False) as registry:
        others = [
            known
            for known in registry.machines.plugins(host)
            if _get_plugin_key(known) != _get_plugin_key(row)
        ]
        registry.machines.put_plugins(host, [*others, row])


def _check_plugin_import(
    found: InstalledPlugin, host: str, tell: Callable[[str], None]
) -> PluginRecord:
    tell(f"{found.distribution}:{found.name}")
    _, state = describe_plugin_state(found)
    if state == "ok":
        return _build_plugin_record(found, host, "ok", "")
    kind, _, why = state.partition(": ")
    return _build_plugin_record(found, host, "clash" if kind == "clash" else "broken", why)


def _build_plugin_record(
    found: InstalledPlugin, host: str, state: Literal["ok", "broken", "clash"], message: str
) -> PluginRecord:
    return PluginRecord(
        host=host,
        kind=found.kind,
        distribution=found.distribution,
        name=found.name,
        version=found.version,
        entry_point=found.value,
        state=state,
        message=message,
        at=time.time(),
    )


def _get_plugin_key(row: PluginRecord) -> Key:
    return row.kind, row.distribution, row.name


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
    signal.alarm(int(PATIENCE) + 5)  # in case the parent has died
    try:
        record_health(os.environ[REGISTRY], lambda plugin: print_text(f"at {plugin}"))
    except RlxError as error:
        print_text(f"error: {error}")
        return error.exit_code
    print_text(DONE)
    return 0


if __name__ == "__main__":
    sys.exit(_run_health_process())
