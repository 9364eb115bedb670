"""Progress of what takes long, on stderr: bars on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from rlx.cli.console import open_console
from rlx.reporting import ShowProgress
from rlx.text import escape_unprintable, format_timestamp

__all__ = ["ProgressDisplay", "format_pace", "open_progress"]

LINE_EVERY = 15.0
"""Seconds between two lines where there is no terminal."""
SPEED_OVER = 300.0
"""Seconds over which speed is measured: a step of training can take minutes."""
LONGEST = 24
"""Longest name of a stage, in columns of a terminal; longer ones are shortened."""


@contextmanager
def open_progress(
    stage: str, unit: str, total: int | None = None, *, hidden: bool = False
) -> Iterator[ShowProgress]:
    """Shows progress until the end of the block; yields the function that moves it.

    Args:
        stage: what is being done.
        unit: what is counted, in the plural.
        total: how many there are; None if unknown so far.
        hidden: show nothing, for results that scroll past on the same terminal.
    """
    console = open_console(stderr=True, quiet=hidden)
    known = stage, total
    with ProgressDisplay(console, unit, transient=True) as display:

        def show(done: int, total: int | None = None, stage: str = "") -> None:
            nonlocal known
            known = stage or known[0], known[1] if total is None else total
            display.show(known[0], done, known[1])

        show(0)
        yield show


class ProgressDisplay:
    """Shows of each stage how much is done, how fast it goes and how long it will take.

    Args:
        console: of stderr.
        unit: what is counted, in the plural.
        transient: bars vanish at the end, and without a terminal short work prints no line. Else
            every stage keeps its bar, or has a line for its beginning and one for its end.
    """

    def __init__(self, console: Console, unit: str = "", *, transient: bool = False) -> None:
        self._console, self._unit, self._transient = console, unit, transient
        self._bars = Progress(
            _TaskColumn(lambda task: task.description, max_width=LONGEST),
            BarColumn(bar_width=12),
            _TaskColumn(_format_count, justify="right"),
            _TaskColumn(format_pace),
            _TaskColumn(lambda task: task.fields["note"], ratio=1),
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
        """Shows that `done` of `total` are done in a stage; earlier stages are over.

        Args:
            stage: its name.
            done: how many are done.
            total: how many there are; None if unknown.
            note: further figures; shortened where a terminal has no room for them.
        """
        begins, self._stage = stage != self._stage, stage
        if begins:
            for task in self._bars.tasks:
                self._bars.update(task.id, completed=task.total, visible=not self._transient)
        if stage not in self._tasks:
            name = escape_unprintable(stage)
            self._tasks[stage] = self._bars.add_task(name, total=total, note="", unit=self._unit)
        elif begins:  # it goes on, such as training after an evaluation
            self._bars.reset(self._tasks[stage], completed=done, visible=True)
            self._ended.discard(self._tasks[stage])
        number = self._tasks[stage]
        self._bars.update(number, completed=done, total=total, note=escape_unprintable(note))
        self._print_line(next(t for t in self._bars.tasks if t.id == number), begins=begins)

    def _print_line(self, task: Task, *, begins: bool) -> None:
        """Prints a line about a stage, where there are no bars and it is due."""
        now = time.monotonic()
        if not self._bars.disable or task.id in self._ended:
            return
        if now - self._printed < LINE_EVERY and (self._transient or not (begins or task.finished)):
            return
        self._printed = now
        if task.finished:
            self._ended.add(task.id)
        cells = (task.description, _format_count(task), format_pace(task), task.fields["note"])
        line = "  ".join([format_timestamp(), *filter(None, cells)])
        self._console.print(line, soft_wrap=True)


class _TaskColumn(ProgressColumn):
    """A column of text, never markup, that is shortened where there is no room."""

    def __init__(self, write: Callable[[Task], str], **column: object) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis", **column))  # type: ignore[arg-type]
        self._write = write

    def render(self, task: Task) -> Text:
        return Text(self._write(task))


def _format_count(task: Task) -> str:
    total = "" if task.total is None else f"/{task.total:.0f}"
    return f"{task.completed:.0f}{total} {task.fields['unit']}".rstrip()


def format_pace(task: Task) -> str:
    """Formats the speed of a task and the time it still takes; after its end, the time it took."""
    if task.finished:
        return f"in {_format_duration(task.finished_time or 0)}"
    speed, left = task.speed, task.time_remaining
    if not speed:
        return ""
    rate = f"{speed:.3g}/s" if speed >= 1 else f"{1 / speed:.3g} s each"
    return rate if left is None else f"{rate}, {_format_duration(left)} left"


def _format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
