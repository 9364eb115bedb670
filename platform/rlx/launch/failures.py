"""Failures of runs for the user: what the machine caused and how to fix it, and the space on disk
that lets a run record that the disk is full.

A full disk can surface as an OSError, as an SQLite error, or only in the message of a native
library. The user sees the same error and exit code in each case.
"""

import errno
import json
import os
import re
import shutil
import signal
import socket
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlx_registry
from rlx.errors import EnvironmentFault, RegistryError, RlxError, SpecError, is_out_of_memory
from rlx.home import RunFolder, get_rlx_home
from rlx.text import escape_unprintable, redact_passwords

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
    """Formats a number of bytes in MB or GB."""
    amount = count / 1024**2
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


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An error number of the operating system, and the file concerned if it is known."""

    errno: int
    path: Path | None


def convert_to_rlx_error(error: BaseException) -> RlxError | None:
    """Converts an exception to an rlx error with its exit code; None if the exception is a bug."""
    if isinstance(error, RlxError):
        return error
    if is_out_of_memory(error):
        return EnvironmentFault(_describe_lack_of_memory(error))
    refusal = _find_refusal(error)
    if refusal is not None and refusal.errno in _FULL:
        return EnvironmentFault(_describe_full_disk(refusal))
    if refusal is not None and refusal.errno == errno.EADDRINUSE:
        return EnvironmentFault(
            f"a port is in use: {escape_unprintable(str(error))}; end the process that listens "
            "there, or choose another port"
        )
    if refusal is not None and (refusal.path is not None or refusal.errno == errno.EROFS):
        return EnvironmentFault(
            _describe_forbidden_path(refusal.errno, refusal.path or get_rlx_home())
        )
    if isinstance(error, rlx_registry.NotFoundError | rlx_registry.AmbiguousNameError):
        return SpecError(str(error))
    if isinstance(error, rlx_registry.RegistryDatabaseError):
        return RegistryError(str(error))
    return None


def write_failure(folder: RunFolder, error: Exception) -> None:
    """Writes why this rank, or the launcher of ranks, failed, for the supervisor; an earlier
    failure is kept."""
    rlx_error = convert_to_rlx_error(error)
    if is_disk_full(error):
        folder.reserve.unlink(missing_ok=True)
    _keep_failure(
        folder,
        {
            "message": describe_error(error),
            "exit_code": 1 if rlx_error is None else rlx_error.exit_code,
            # An rlx error would occur again; a lost connection or device may come back.
            "again": is_registry_away(error) or rlx_error is None,
        },
    )


def write_failure_reason(
    folder: RunFolder, message: str, *, again: bool, replaces: bool = False
) -> None:
    """Writes why ranks ended that could not write it themselves.

    Args:
        again: whether another attempt may succeed.
        replaces: take the place of what peers of the lost rank have written, unless that would
            occur again.
    """
    if replaces:
        with suppress(FileNotFoundError):
            if json.loads(folder.failure.read_text())["again"]:
                folder.failure.unlink()
    _keep_failure(folder, {"message": message, "exit_code": 1, "again": again})


def _keep_failure(folder: RunFolder, failure: Mapping[str, Any]) -> None:
    """Writes a failure atomically, unless there is one."""
    if not folder.failure.exists():
        aside = folder.failure.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        aside.write_text(json.dumps(failure))
        aside.replace(folder.failure)


def is_registry_away(error: BaseException) -> bool:
    """Whether the registry could not be reached, which may be temporary."""
    return isinstance(error, rlx_registry.DatabaseUnavailableError) and not isinstance(
        error, rlx_registry.DatabaseUnwritableError
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception was caused by a full disk or an exhausted quota."""
    refusal = _find_refusal(error)
    return refusal is not None and refusal.errno in _FULL


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


def _find_refusal(error: BaseException | None) -> _Refusal | None:
    """Finds the operating system's error in an exception or its causes."""
    while error is not None:
        if isinstance(error, rlx_registry.DatabaseUnwritableError):
            return _Refusal(error.errno, error.path)
        if isinstance(error, OSError) and error.errno in (*_FULL, *_FORBIDDEN, errno.EADDRINUSE):
            filename = error.filename if isinstance(error.filename, str | os.PathLike) else None
            return _Refusal(error.errno, None if filename is None else Path(filename))
        for number in (*_FULL, errno.EROFS):  # some libraries pass on only the message
            if os.strerror(number) in str(error):
                return _Refusal(number, None)
        error = error.__cause__
    return None


def _describe_full_disk(refusal: _Refusal) -> str:
    folder = get_rlx_home() if refusal.path is None else refusal.path.absolute().parent
    free = free_bytes(folder)
    if refusal.errno == errno.EDQUOT:
        return (
            f"disk quota exceeded in {folder}: free some space, or set RLX_HOME to another folder"
        )
    if refusal.path is None and free > RESERVE_BYTES:
        return "disk full while writing output: free some space on that disk"
    return (
        f"disk full: {folder} has {format_disk_space(free)} left; free some space, or set "
        "RLX_HOME to a folder "
        "on another disk"
    )


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
