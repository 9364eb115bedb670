"""Every exception the registry raises on purpose.

Methods raise ValueError and TypeError for invalid arguments.
"""

from pathlib import Path


class RegistryDatabaseError(Exception):
    """Base class of the registry's errors."""


class NotFoundError(RegistryDatabaseError, LookupError):
    """The requested object is not in the registry."""


class AmbiguousNameError(RegistryDatabaseError, LookupError):
    """Several runs have the requested name."""


class FencedError(RegistryDatabaseError):
    """A later attempt now writes this run; the caller should stop at once."""


class DevicesBusyError(RegistryDatabaseError):
    """Too few devices are free; a later attempt may succeed."""


class SchemaError(RegistryDatabaseError):
    """This version cannot use the database's tables."""


class NoTablesError(SchemaError):
    """The database has no tables of a registry; opened for writing, it may get them."""


class DatabaseUnavailableError(RegistryDatabaseError):
    """The database cannot be opened or written."""


class DatabaseUnwritableError(DatabaseUnavailableError):
    """The file system refuses a write; the database itself is intact.

    Attributes:
        path: the database file.
        errno: the operating system's error: `ENOSPC`, `EDQUOT`, `EROFS`, `EACCES` or `EPERM`.
    """

    def __init__(self, path: Path, errno: int, message: str) -> None:
        self.path = path
        self.errno = errno
        super().__init__(f"registry {path}: {message}")


class BodyError(RegistryDatabaseError):
    """A rollout file is missing, damaged, or does not match its recorded digest."""
