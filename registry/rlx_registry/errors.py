"""Every exception the registry raises on purpose.

* RegistryError     the registry cannot do what was asked
  x NotFound        no such run, rollout step, ...
  x Ambiguous       several runs answer to that name
  x SchemaError     the database was written by a newer version, or by somebody else
  x Unavailable     the database is missing, locked, read-only, or of an unsupported kind
  x BodyError       a body file is missing, damaged, or not the one that was recorded

ValueError and TypeError are for misuse of a single method.
"""

__all__ = ["Ambiguous", "BodyError", "NotFound", "RegistryError", "SchemaError", "Unavailable"]


class RegistryError(Exception):
    """Base of every deliberate failure of the registry."""


class NotFound(RegistryError, LookupError):
    """What was asked for is not in the registry."""


class Ambiguous(RegistryError, LookupError):
    """A name stands for more than one run."""


class SchemaError(RegistryError):
    """The tables are not ones that this version can use."""


class Unavailable(RegistryError):
    """The database cannot be opened, or cannot be written."""


class BodyError(RegistryError):
    """A body file cannot be trusted."""
