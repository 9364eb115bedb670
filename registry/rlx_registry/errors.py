"""Every exception the registry raises on purpose.

* RegistryError     the registry cannot do what was asked
  x NotFound        no such run, rollout step, ...
  x Ambiguous       several runs answer to that name
  x Fenced          a later attempt has taken the run over from this writer
  x Busy            other runs hold too many of the devices that were asked for
  x SchemaError     the database was written by a newer version, or by somebody else
  x Unavailable     the database is missing, locked, opened for reading, or of an unsupported kind
    x Unwritable    the file system refuses: it is full, or may only be read
  x BodyError       a body file is missing, damaged, or not the one that was recorded
  x JournalError    a run's journal is missing, or does not tell of a run

ValueError and TypeError are for misuse of a single method.
"""

from pathlib import Path

__all__ = [
    "AmbiguousNameError",
    "BodyError",
    "DatabaseUnavailableError",
    "DatabaseUnwritableError",
    "DevicesBusyError",
    "FencedError",
    "JournalError",
    "NotFoundError",
    "RegistryDatabaseError",
    "SchemaError",
]


class RegistryDatabaseError(Exception):
    """Base of every deliberate failure of the registry."""


class NotFoundError(RegistryDatabaseError, LookupError):
    """What was asked for is not in the registry."""


class AmbiguousNameError(RegistryDatabaseError, LookupError):
    """A name stands for more than one run."""


class FencedError(RegistryDatabaseError):
    """A later attempt writes this run now; whoever meets this should stop at once."""


class DevicesBusyError(RegistryDatabaseError):
    """Too few of the devices are free; they may be in a while."""


class SchemaError(RegistryDatabaseError):
    """The tables are not ones that this version can use."""


class DatabaseUnavailableError(RegistryDatabaseError):
    """The database cannot be opened, or cannot be written."""


class DatabaseUnwritableError(DatabaseUnavailableError):
    """The file system under the database refuses; nothing is wrong with the database itself.

    Attributes:
        path: the database.
        errno: why, as the operating system says it: `ENOSPC`, `EDQUOT`, `EROFS`, `EACCES`, `EPERM`.
    """

    def __init__(self, path: Path, errno: int, message: str) -> None:
        self.path = path
        self.errno = errno
        super().__init__(f"registry {path}: {message}")


class BodyError(RegistryDatabaseError):
    """A body file cannot be trusted."""


class JournalError(RegistryDatabaseError):
    """A run cannot be made again from its folder."""
