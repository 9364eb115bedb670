"""Files that users name: how they are written, and the error where they cannot be."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlx.errors import EnvironmentFault
from rlx.text import escape_unprintable

__all__ = ["explain_write_errors", "write_text_file"]


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Names the file of an OSError in the block.

    Raises:
        EnvironmentFault: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        where = escape_unprintable(str(path))
        raise EnvironmentFault(f"cannot write {where}: {error.strerror or error}") from error


def write_text_file(path: Path, text: str) -> None:
    """Writes a text as UTF-8, in a folder that is made if it is missing.

    Raises:
        EnvironmentFault: the file cannot be written.
    """
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
