"""Failures of runs for the user: what the machine caused and how to fix it, and the space on disk
that lets a run record that the disk is full.
"""

import errno
import json
import os
import re
import shutil
import signal
import socket
import traceback
from contextlib import suppress
from pathlib import Path

from rlx.errors import EnvironmentFault, RegistryError, RlxError, SpecError, is_out_of_memory
from rlx.home import RunFolder, get_rlx_home
from rlx.text import escape_unprintable, redact_passwords
from rlx_registry import (
    AmbiguousNameError,
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    NotFoundError,
    RegistryDatabaseError,
)

RESERVE_BYTES = 2 * 1024**2
"""Bytes that a run reserves on disk: far more than its final records need."""
LOW_DISK_BYTES = 200 * 1024**2
"""rlx warns if fewer bytes than this are free."""


def free_bytes(path: Path) -> int:
    """Free bytes on the file system of `path`, which need not exist yet."""
    path = path.absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(there).free


def format_disk_space(count: int) -> str:
    amount = count / 1024**2
    if amount < 1:
        return f"{count / 1024:.0f} kB"
    return f"{amount / 1024:.0f} GB" if amount >= 10 * 1024 else f"{amount:.0f} MB"


def hold_reserve(path: Path) -> None:
    """Writes a file of `RESERVE_BYTES` bytes; deleting it frees the space.

    Raises:
        OSError: the disk has too little space, or the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(os.urandom(RESERVE_BYTES))  # some file systems store zeros without using space
        os.fsync(file.fileno())


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


def convert_to_rlx_error(error: BaseException) -> RlxError | None:
    """Converts an exception to an rlx error with its exit code; None if the exception is a bug."""
    if isinstance(error, RlxError):
        return error
    if is_out_of_memory(error):
        return EnvironmentFault(_describe_lack_of_memory(error))
    match _find_refusal(error):
        case number, path if number in _FULL:
            return EnvironmentFault(_describe_full_disk(number, path))
        case errno.EADDRINUSE, _:
            return EnvironmentFault(
                f"a port is in use: {escape_unprintable(str(error))}; end the process that listens "
                "there, or choose another port"
            )
        case number, path if path is not None or number == errno.EROFS:
            return EnvironmentFault(_describe_forbidden_path(number, path or get_rlx_home()))
    if isinstance(error, NotFoundError | AmbiguousNameError):
        return SpecError(str(error))
    if isinstance(error, RegistryDatabaseError):
        return RegistryError(str(error))
    return None


def write_failure(folder: RunFolder, error: Exception) -> None:
    """Writes why this rank, or the launcher of ranks, failed, for the supervisor; an earlier
    failure is kept."""
    rlx_error = convert_to_rlx_error(error)
    if is_disk_full(error):
        folder.reserve.unlink(missing_ok=True)
    # An rlx error would occur again; a lost connection or device may come back.
    is_away = isinstance(error, DatabaseUnavailableError) and not isinstance(
        error, DatabaseUnwritableError
    )
    code = 1 if rlx_error is None else rlx_error.exit_code
    _keep_failure(folder, describe_error(error), code, again=is_away or rlx_error is None)


def write_failure_reason(folder: RunFolder, message: str, *, replaces: bool = False) -> None:
    """Writes why ranks ended that could not write it themselves; another attempt may succeed. It
    `replaces` what peers of a lost rank have written, unless that would occur again."""
    if replaces:
        with suppress(FileNotFoundError):
            if json.loads(folder.failure.read_text())["again"]:
                folder.failure.unlink()
    _keep_failure(folder, message, 1, again=True)


def _keep_failure(folder: RunFolder, message: str, exit_code: int, *, again: bool) -> None:
    """Writes a failure atomically, unless there is one."""
    if not folder.failure.exists():
        aside = folder.failure.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        aside.write_text(json.dumps({"message": message, "exit_code": exit_code, "again": again}))
        aside.replace(folder.failure)


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception was caused by a full disk or an exhausted quota."""
    number, _ = _find_refusal(error)
    return number in _FULL


def _describe_lack_of_memory(error: BaseException) -> str:
    """Names the settings that need less memory, first the one of the stage that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    sampled = any(Path(frame.filename).parent.name == "sampler" for frame in frames)
    helps = ["lower runner.micro_batch_tokens", "set runner.activation_checkpointing: true"]
    helps.insert(0 if sampled else 2, "lower sampler.max_rows")
    stage = "while it sampled" if sampled else "while it computed the learner's part"
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    more = f", when {asked[1]} more were needed" if asked else ""
    return (
        f"the GPU ran out of memory {stage}{more}: {', '.join(helps[:2])}, or {helps[2]}; "
        "`rlx plan --full` shows what takes how much"
    )


def describe_error(error: BaseException) -> str:
    """One sentence for the record: an rlx error's message, or the type and text of a bug."""
    rlx_error = convert_to_rlx_error(error)
    text = f"{type(error).__name__}: {error}" if rlx_error is None else str(rlx_error)
    return redact_passwords(text)


def describe_signal(number: int) -> str:
    """How a signal ended a process, as in "a rank was killed by signal 9"."""
    hint = "; out of memory?" if number == signal.SIGKILL else ""
    return f"killed by signal {number} ({signal.Signals(number).name}{hint})"


def _find_refusal(error: BaseException | None) -> tuple[int, Path | None]:
    """The operating system's error number in an exception or its causes, 0 without one, and the
    file concerned if it is known."""
    while error is not None:
        if isinstance(error, DatabaseUnwritableError):
            return error.errno, error.path
        if isinstance(error, OSError) and error.errno in (*_FULL, *_FORBIDDEN, errno.EADDRINUSE):
            known = isinstance(error.filename, str | os.PathLike)
            return error.errno, Path(error.filename) if known else None
        for number in (*_FULL, errno.EROFS):  # some libraries pass on only the message
            if os.strerror(number) in str(error):
                return number, None
        error = error.__cause__
    return 0, None


def _describe_full_disk(number: int, path: Path | None) -> str:
    folder = get_rlx_home() if path is None else path.absolute().parent
    free = free_bytes(folder)
    if path is None and free > RESERVE_BYTES and number != errno.EDQUOT:
        return "disk full while writing output: free some space on that disk"
    left = f"disk full: {folder} has {format_disk_space(free)} left"
    what = f"disk quota exceeded in {folder}" if number == errno.EDQUOT else left
    return f"{what}; free some space, or set RLX_HOME to a folder on another disk"


def _describe_forbidden_path(number: int, path: Path) -> str:
    path = path.absolute()
    ours = path.is_relative_to(get_rlx_home())
    place = "set RLX_HOME to a writable folder" if ours else "choose a writable folder"
    if number == errno.EROFS:
        return f"{path} is on a read-only file system: {place}"
    return (
        f"this user cannot access {path} ({os.strerror(number).lower()}): change its permissions, "
        f"or {place}"
    )
