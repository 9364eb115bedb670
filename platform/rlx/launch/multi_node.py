"""Runs a run's ranks on several machines: `python -m rlx.launch.multi_node FOLDER RUN_ID`.

The supervisor starts this process in place of torchrun. It opens the sessions of the launcher, such
as an srun for all machines. It sends each `rlx.launch.node` its order, and heartbeats for as long
as it is alive itself. If one session fails, all sessions are ended.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from rlx.home import RunFolder
from rlx.launch.launcher import MultiNodeLauncher, NodeOrder, open_launcher
from rlx.launch.log_lines import stamp_output
from rlx.launch.node import STOP, write_end_reason
from rlx.launch.ports import find_free_port
from rlx.launch.stored_spec import load_resolved_spec
from rlx.spec import RunnerSpec

__all__ = ["main"]

BEAT = 5.0
"""Seconds between heartbeats."""
GRACE = 30.0
"""Seconds that a session has to end after its input is closed."""
LOOK = 0.25
FORWARDED_PREFIXES = (
    *("RLX_", "OMP_", "PYTHON", "HF_", "TOKENIZERS_", "TRANSFORMERS_", "TORCH", "NCCL_", "GLOO_"),
    "VLLM_",
    *("PATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
)
"""Prefixes of the environment variables that are passed to every machine."""
NODE = [sys.executable, "-m", "rlx.launch.node"]
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def main(folder: str, run_id: str) -> int:
    """Runs the ranks on all machines until they end; returns the exit code."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    paths = RunFolder(Path(folder))
    runner = load_resolved_spec(paths).runner
    try:
        sessions = list(_start_sessions(runner, paths, run_id))
    except Exception as error:
        write_end_reason(paths, str(error), getattr(error, "exit_code", 1), again=False)
        raise
    return _watch_sessions(sessions, psutil.Process(int(os.environ["RLX_SUPERVISOR"])), stop, paths)


class _MachineSession:
    """A process on one machine or on several, and the pipe that keeps it alive."""

    def __init__(self, name: str, command: Sequence[str], order: NodeOrder) -> None:
        self.name = name
        # In its own session: the pipe ends it, not the signals that this process receives.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.send_line(json.dumps(order).encode() + b"\n")

    def send_line(self, line: bytes) -> None:
        """Sends a line to the machines of this session."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `poll` reports
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def end(self) -> None:
        """Closes the session's input, which ends its ranks, and waits."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _start_sessions(
    runner: RunnerSpec, folder: RunFolder, run_id: str
) -> Iterator[_MachineSession]:
    launcher = open_launcher(runner)
    assert isinstance(launcher, MultiNodeLauncher)
    order: NodeOrder = {
        "folder": str(folder.root),
        "run_id": run_id,
        "cwd": str(Path.cwd()),
        "node": None,
        "nodes": 1,
        "ranks": runner.ranks,
        "address": None,
        "port": find_free_port(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(FORWARDED_PREFIXES)},
    }
    for session in launcher.list_sessions(order, NODE):
        yield _MachineSession(*session)


def _watch_sessions(
    sessions: Sequence[_MachineSession],
    supervisor: psutil.Process,
    stop: list[int],
    folder: RunFolder,
) -> int:
    """Waits for all sessions to end; ends all if one fails or the supervisor is gone."""
    beat, stop_sent = time.monotonic(), False
    code = 0
    while not code and any(session.process.poll() is None for session in sessions):
        time.sleep(LOOK)
        if stop and not stop_sent:
            stop_sent = True
            for session in sessions:
                session.send_line(STOP)
        if time.monotonic() - beat > BEAT:
            beat = time.monotonic()
            for session in sessions:
                session.send_line(b"\n")
        ended = [s for s in sessions if s.process.poll()]
        if ended and not stop_sent:
            code = _report_failed_session(ended[0], folder)
        if not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE:
            code = 1
    for session in sessions:
        session.end()
    return code


def _report_failed_session(session: _MachineSession, folder: RunFolder) -> int:
    """Reports which session failed and how; returns the exit code."""
    code = session.process.returncode
    print(f"{session.name} ended with code {code}", file=sys.stderr, flush=True)
    if code in (NOT_EXECUTABLE, NOT_FOUND):
        message = (
            f"{session.name} cannot run {sys.executable}: every host needs rlx at the same path"
        )
        write_end_reason(folder, message, 4, again=False)
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    stamp_output()
    sys.exit(main(*sys.argv[1:]))
