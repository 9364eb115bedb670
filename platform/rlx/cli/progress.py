"""Progress of what takes long, on stderr: bars on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn
from rich.table import Column

from rlx.cli.console import open_console
from rlx.progress import ShowProgress
from rlx.text import escape_unprintable, format_duration, format_timestamp

LINE_EVERY = 15.0
"""Seconds between two lines where there is no terminal."""
SPEED_OVER = 300.0
"""Seconds over which speed is measured: a step of training can take minutes."""


@contextmanager
def open_progress(stage: str, unit: str, *, hidden: bool = False) -> Iterator[ShowProgress]:
    """Shows progress in `unit`, a plural, until the end of the block, unless `hidden` for results
    that scroll past on the same terminal; yields the function that moves it."""
    known: tuple[str, int | None] = stage, None
    with ProgressDisplay(open_console(stderr=True, quiet=hidden), unit, transient=True) as display:

        def show(done: int, total: int | None = None, stage: str = "") -> None:
            nonlocal known
            known = stage or known[0], known[1] if total is None else total
            display.show(known[0], done, known[1])

        show(0)
        yield show


class ProgressDisplay:
    """Shows of each stage how much is done, how fast it goes and how long it will take.

    Args:
        transient: bars vanish at the end, and without a terminal short work prints no line. Else
            every stage keeps its bar, or has a line for its beginning and one for its end.
    """

    def __init__(self, console: Console, unit: str = "", *, transient: bool = False) -> None:
        self._console, self._unit, self._transient = console, unit, transient

        def column(field: str, width: int | None = None, ratio: int | None = None) -> TextColumn:
            whole = Column(no_wrap=True, overflow="ellipsis", max_width=width, ratio=ratio)
            return TextColumn(f"{{task.{field}}}", markup=False, table_column=whole)

        self._bars = Progress(
            column("description", 24),
            BarColumn(bar_width=12),
            column("fields[count]"),
            column("fields[pace]"),
            column("fields[note]", ratio=1),
            console=console,
            disable=not console.is_terminal or console.quiet,
            transient=transient,
            redirect_stdout=sys.stdout.isatty(),  # else results would go to stderr
            expand=True,
            speed_estimate_period=SPEED_OVER,
        )
        self._tasks: dict[str, TaskID] = {}
        self._stage = ""
        self._ended: set[TaskID] = set()
        self._printed = time.monotonic()

    def __enter__(self) -> "ProgressDisplay":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        """Shows that `done` of `total`, None if unknown, are done in a stage; earlier stages are
        over. A `note` is shortened where a terminal has no room for it."""
        bars, begins, self._stage = self._bars, stage != self._stage, stage
        if begins:
            for task in bars.tasks:
                bars.update(task.id, completed=task.total, visible=not self._transient)
        if stage not in self._tasks:
            name = escape_unprintable(stage)
            self._tasks[stage] = bars.add_task(name, total=total, note="", count="", pace="")
        elif begins:  # it goes on, such as training after an evaluation
            bars.reset(self._tasks[stage], completed=done, visible=True)
            self._ended.discard(self._tasks[stage])
        number = self._tasks[stage]
        bars.update(number, completed=done, total=total)
        task = next(task for task in bars.tasks if task.id == number)
        count = f"{done}{'' if total is None else f'/{total}'} {self._unit}".rstrip()
        bars.update(number, note=escape_unprintable(note), count=count, pace=_format_pace(task))
        if bars.disable and number not in self._ended:
            self._print_line(task, begins=begins)

    def _print_line(self, task: Task, *, begins: bool) -> None:
        now = time.monotonic()
        if now - self._printed < LINE_EVERY and (self._transient or not (begins or task.finished)):
            return
        self._printed = now
        if task.finished:
            self._ended.add(task.id)
        cells = (task.description, *(task.fields[name] for name in ("count", "pace", "note")))
        line = "  ".join([format_timestamp(), *filter(None, cells)])
        self._console.print(line, soft_wrap=True)


def _format_pace(task: Task) -> str:
    """The speed of a task and the time it still takes; after its end, the time it took."""
    if task.finished:
        return f"in {format_duration(task.finished_time or 0)}"
    speed, left = task.speed, task.time_remaining
    if not speed:
        return ""
    rate = f"{speed:.3g}/s" if speed >= 1 else f"{1 / speed:.3g} s each"
    return rate if left is None else f"{rate}, {format_duration(left)} left"
