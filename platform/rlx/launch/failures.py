"""What a failure means to the user: which ones are the machine's, and a sentence for each.

A full disk may show up as an OSError, as SQLite's own error, or in the words of a library that
writes files in another language; it is one thing to the user, with one exit code.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import rlx_registry
from rlx.errors import EnvironmentFault, RegistryError, RlxError, SpecError
from rlx.home import get_rlx_home
from rlx.launch.disk import RESERVE, format_disk_space, free_bytes
from rlx.text import escape_unprintable

__all__ = ["convert_to_rlx_error", "describe_error", "is_disk_full", "is_registry_away"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What the operating system would not do, and with which file where that is known."""

    errno: int
    path: Path | None


def convert_to_rlx_error(error: BaseException) -> RlxError | None:
    """Returns the failure as rlx's own, with the exit code of its kind; None when it is a bug."""
    if isinstance(error, RlxError):
        return error
    refusal = _find_refusal(error)
    if refusal is not None and refusal.errno in _FULL:
        return EnvironmentFault(_describe_full_disk(refusal))
    if refusal is not None and refusal.errno == errno.EADDRINUSE:
        return EnvironmentFault(
            f"a port is taken: {escape_unprintable(str(error))}; end the process that listens "
            "there, or "
            "choose another port"
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


def is_registry_away(error: BaseException) -> bool:
    """Whether a failure is that of a registry that could not be reached, and may be back."""
    return isinstance(error, rlx_registry.DatabaseUnavailableError) and not isinstance(
        error, rlx_registry.DatabaseUnwritableError
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether a failure came from a disk, or a quota, that is used up."""
    refusal = _find_refusal(error)
    return refusal is not None and refusal.errno in _FULL


def describe_error(error: BaseException) -> str:
    """One sentence for the record: the fault's own, or a bug's type and text."""
    told = convert_to_rlx_error(error)
    return f"{type(error).__name__}: {error}" if told is None else str(told)


def _find_refusal(error: BaseException | None) -> _Refusal | None:
    """The operating system's part in a failure, looked for along its causes."""
    while error is not None:
        if isinstance(error, rlx_registry.DatabaseUnwritableError):
            return _Refusal(error.errno, error.path)
        if isinstance(error, OSError) and error.errno in (*_FULL, *_FORBIDDEN, errno.EADDRINUSE):
            named = error.filename if isinstance(error.filename, str | os.PathLike) else None
            return _Refusal(error.errno, None if named is None else Path(named))
        for number in (*_FULL, errno.EROFS):  # libraries that pass on the words alone
            if os.strerror(number) in str(error):
                return _Refusal(number, None)
        error = error.__cause__
    return None


def _describe_full_disk(refusal: _Refusal) -> str:
    folder = get_rlx_home() if refusal.path is None else refusal.path.absolute().parent
    free = free_bytes(folder)
    if refusal.errno == errno.EDQUOT:
        return f"disk quota used up in {folder}: free some space, or set RLX_HOME to another folder"
    if refusal.path is None and free > RESERVE:
        return "disk full where output was being written: free some space there"
    return (
        f"disk full: {folder} has {format_disk_space(free)} left; free some space, or set "
        "RLX_HOME to a folder "
        "on another disk"
    )


def _describe_forbidden_path(number: int, path: Path) -> str:
    path = path.absolute()
    ours = path.is_relative_to(get_rlx_home())
    place = "set RLX_HOME to a folder" if ours else "choose a place"
    if number == errno.EROFS:
        return f"{path} is on a file system that may only be read: {place} that can be written"
    return (
        f"{path} may not be used by this user ({os.strerror(number).lower()}): change its "
        f"permissions, or {place} that can be"
    )
