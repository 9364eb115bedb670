"""The progress bar of commands that take long; on stderr, and only if that is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlx.reporting import ShowProgress
from rlx.text import escape_unprintable

__all__ = ["open_progress_bar"]


@contextmanager
def open_progress_bar(
    stage: str, unit: str, total: int | None = None, *, hidden: bool = False
) -> Iterator[ShowProgress]:
    """Shows a progress bar until the end of the block; yields the function that moves it.

    Args:
        stage: what is being done.
        unit: what is counted, in the plural.
        total: how many there are; None if unknown so far.
        hidden: show nothing, for results that scroll past on the same terminal.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from rlx.cli.console import open_console

    console = open_console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        disable=hidden or not console.is_terminal,
        transient=True,
    )
    with bars:
        task = bars.add_task(stage, total=total, count="")

        def show(done: int, total: int | None = None, stage: str = "") -> None:
            described = escape_unprintable(stage) if stage else None
            bars.update(task, completed=done, total=total, description=described)
            known = bars.tasks[task].total
            of = "" if known is None else f"/{known:.0f}"
            bars.update(task, count=f"{done}{of} {unit}")

        yield show
