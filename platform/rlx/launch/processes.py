"""The processes of a run on this machine: finds them by their command lines, takes signals that
request a stop, stamps the lines that they print, and removes the temporary files of the dead.

The ranks that a process starts share a temporary folder. Its name is a mark of the run and the id
of that process, which removes it when its ranks have ended, and those of dead processes of the run
before it starts any.
"""

import hashlib
import io
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import SystemRandom
from threading import current_thread, main_thread
from typing import TextIO

import psutil

from rlx.errors import EnvironmentFault
from rlx.home import RunFolder, get_rlx_home
from rlx.text import format_timestamp
from rlx_registry import RunRecord, is_supervisor_alive

_RANK = "rlx.launch.rank"
"""Module on the command lines of ranks, and of a torchrun that starts them."""


def this_machine() -> str:
    """The host name under which the registry records this machine's processes and devices."""
    return socket.gethostname()


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not collected it yet (a zombie)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_abandoned(run: RunRecord) -> bool:
    """Whether a run that is recorded as active has lost its supervisor, by its process on this
    machine or by its heartbeat on another."""
    return run.effective_status == "lost" or has_lost_supervisor(run)


def has_lost_supervisor(run: RunRecord) -> bool:
    """Whether this machine sees that the supervisor of an active run is gone, or the submission
    that has not started one yet. The state of a job is its job system's to know."""
    if run.status not in ("queued", "submitted", "running") or run.pid is None or is_job(run):
        return False
    return is_supervisor_alive(run.directory) is False


def is_job(run: RunRecord) -> bool:
    """Whether a job system has taken a run."""
    return run.directory is not None and RunFolder(Path(run.directory)).job.exists()


def is_supervisor(pid: int, run_id: str) -> bool:
    """Whether `pid` is alive and still the supervisor of that run: process ids are reused."""
    try:
        command = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return "rlx.launch.supervisor" in command and run_id in command


def list_live_ranks(folder: Path, supervisor: int | None = None) -> Iterator[int]:
    """Process ids of a run's live ranks, and of their launcher if they have one.

    Args:
        folder: the run's, which is on their command lines.
        supervisor: only the ranks of this supervisor; a later attempt on this machine has others.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            if str(folder) not in command or _RANK not in command:
                continue
            if supervisor in (None, int(process.environ().get("RLX_SUPERVISOR", 0))):
                yield process.pid


def signal_ranks(folder: Path, number: int, supervisor: int | None = None) -> None:
    """Sends a signal to those that `list_live_ranks` lists."""
    for pid in list_live_ranks(folder, supervisor):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user, a system or a terminal ends a command."""


class SigtermListener:
    """Listens for SIGTERM: the first one requests a stop with a checkpoint, the second a kill."""

    def __init__(self) -> None:
        self.stop = False
        self.kill = False
        self._count = 0
        signal.signal(signal.SIGTERM, self._handle_signal)

    def _handle_signal(self, *_: object) -> None:
        self._count += 1  # counts signals only, not requests through the registry
        self.kill |= self._count > 1
        self.stop = True

    def apply_request(self, request: str | None) -> None:
        """Applies a request from the registry, which may come from another machine."""
        self.kill |= request == "kill"
        self.stop |= request is not None


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delays interrupts to the end of the block, so that a recorded run is also started."""
    if current_thread() is not main_thread():
        yield
        return
    late: list[int] = []
    before = {n: signal.signal(n, lambda number, _: late.append(number)) for n in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for interrupt in late:
        signal.raise_signal(interrupt)


_FOLDER_NAME = re.compile(r"rlx-([0-9a-f]{10})-(\d+)-\w{8}")
"""Names of temporary folders: the mark of a run, and the id of the process that made it."""


@contextmanager
def open_temporary_folder(run: RunFolder) -> Iterator[dict[str, str]]:
    """Makes a temporary folder for the ranks of an attempt, and sweeps up after them.

    It is no folder of the run's, because sockets need short paths and local disks are faster.

    Yields:
        The environment variables that make the ranks use it.
    """
    mark = hashlib.sha256(os.fsencode(run.root)).hexdigest()[:10]
    _remove_leftovers(mark)
    folder = tempfile.mkdtemp(prefix=f"rlx-{mark}-{os.getpid()}-")
    try:
        yield {"TMPDIR": folder}
    finally:
        _remove_leftovers(mark)


def remove_temporary_folder() -> None:
    """Removes the temporary folder of a rank whose supervisor is gone."""
    folder = Path(tempfile.gettempdir())
    if _FOLDER_NAME.fullmatch(folder.name):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(mark: str) -> None:
    """Removes temporary folders of this process and of ended ones, with vLLM's in shared memory."""
    for place in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        for path in place.glob(f"rlx-{mark}-*"):
            name = _FOLDER_NAME.match(path.name)
            if name is not None and (int(name[2]) == os.getpid() or has_ended(int(name[2]))):
                shutil.rmtree(path, ignore_errors=True)


KERNELS = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps what it compiles. Importing its compiler sets it, which a plugin may do."""
_USER_CHOSE_KERNELS = KERNELS in os.environ


def child_environment() -> dict[str, str]:
    """Environment of the supervisor and ranks: quiet libraries, passively waiting threads."""
    own = {k: v for k, v in os.environ.items() if k != KERNELS or _USER_CHOSE_KERNELS}
    return {
        **own,
        "RLX_HOME": str(get_rlx_home()),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


TIMESTAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "
"""Pattern of what `stamp_output` puts before a line."""


def stamp_output() -> None:
    """Has this process print the time before each line of stdout and stderr."""
    sys.stdout, sys.stderr = _StampedStream(sys.stdout), _StampedStream(sys.stderr)


class _StampedStream(io.TextIOWrapper):
    """Writes whole lines, so that those of several processes do not mix."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            stream.buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        self._begins = True

    def write(self, text: str) -> int:
        stamped = []
        for line in io.StringIO(text, newline="\n"):
            stamped += [f"{format_timestamp()}  {line}" if self._begins else line]
            self._begins = line.endswith("\n")
        super().write("".join(stamped))
        return len(text)


CHOSEN_PORTS = range(20_000, 30_000)
"""Above Ray's workers, and below what systems give to processes that ask for any port."""


def find_free_port() -> int:
    """A port that is free at the moment, and none of those that another process gets meanwhile
    without having chosen it."""
    for port in SystemRandom().sample(CHOSEN_PORTS, len(CHOSEN_PORTS)):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    raise EnvironmentFault(f"no port from {CHOSEN_PORTS[0]} to {CHOSEN_PORTS[-1]} can be used")


def find_network_interface(address: str) -> str | None:
    """The network interface through which this machine reaches an address."""
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
