"""The progress bar of commands that take long; on stderr, and only if that is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rlx.text import escape_unprintable

__all__ = ["ShowProgress", "open_progress_bar"]


class ShowProgress(Protocol):
    """Shows how far a command is."""

    def __call__(self, done: int, total: int | None = None, stage: str = "") -> None:
        """Shows `done` of `total`; leaves total and stage as they were if they are not given."""


@contextmanager
def open_progress_bar(stage: str, unit: str, total: int | None = None) -> Iterator[ShowProgress]:
    """Shows a progress bar until the end of the block; yields the function that moves it.

    Args:
        stage: what is being done.
        unit: what is counted, in the plural.
        total: how many there are; None if unknown so far.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rlx.cli.console import open_console

    console = open_console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit, markup=False),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bars:
        task = bars.add_task(stage, total=total)

        def show(done: int, total: int | None = None, stage: str = "") -> None:
            described = escape_unprintable(stage) if stage else None
            bars.update(task, completed=done, total=total, description=described)

        yield show
