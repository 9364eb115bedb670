"""`rlx score`: scores a file of responses with a reward plugin."""

import gzip
import math
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import click

from rlx.cli.output import format_json, print_text
from rlx.cli.response_lines import ResponseLine, group_neighboring_lines, read_lines
from rlx.discovery import build_plugin
from rlx.errors import EnvironmentFault, PluginError, SpecError
from rlx.plugin import Plugin, RewardPlugin, Score
from rlx.reward import RewardJob, RewardPool
from rlx.spec import PluginUse, RunnerSpec
from rlx.spec.reading import (
    InvalidSpec,
    apply_overrides,
    build_refusal,
    locate_diagnostic,
    parse_yaml_document,
)
from rlx.text import escape_unprintable

if TYPE_CHECKING:
    import rich.progress

__all__ = ["score"]

_LINES = 2048  # per batch; files may have millions
_CHARACTERS = 8 << 20


@dataclass(frozen=True, slots=True)
class _ScoredLine:
    """The result of one line.

    Attributes:
        reason: the reward's explanation of its score, or why there is none.
    """

    line: ResponseLine
    verdict: Score | None
    reason: str | None

    @property
    def status(self) -> Literal["scored", "absent"]:
        return "absent" if self.verdict is None else "scored"

    def to_plain_dict(self) -> dict[str, Any]:
        named = {} if self.line.id is None else {"id": self.line.id}
        return {
            "line": self.line.number,
            **named,
            "status": self.status,
            "score": self.verdict and self.verdict.value,
            "parts": dict(self.verdict.parts) if self.verdict else {},
            "reason": self.reason,
        }


@dataclass(slots=True)
class _Count:
    scored: int = 0
    absent: int = 0
    total: float = 0.0

    def add(self, batch: Iterable[_ScoredLine]) -> None:
        for each in batch:
            if each.verdict is None:
                self.absent += 1
            else:
                self.scored += 1
                self.total += each.verdict.value

    @property
    def lines(self) -> int:
        return self.scored + self.absent

    def describe_counts(self, seconds: float) -> str:
        mean = f"mean score {self.total / self.scored:.4g}; " if self.scored else ""
        rate = self.lines / seconds if seconds > 0 else 0.0
        return f"{self.scored} scored, {self.absent} absent; {mean}{rate:.0f} lines per second"


@click.command()
@click.option("--reward", "name", required=True, metavar="NAME", help="Name of a reward plugin.")
@click.argument("file", metavar="FILE")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="OPTION=VALUE",
    help="Set an option of the reward; can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON Lines.")
@click.option(
    "--response-field", default="response", show_default=True, help="JSON key of the response."
)
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, max=86_400, min_open=True),
    default=5.0,
    show_default=True,
    help="Time limit of one call, in seconds.",
)
def score(
    name: str,
    file: str,
    overrides: tuple[str, ...],
    as_json: bool,
    response_field: str,
    workers: int,
    deadline: float,
) -> int:
    """Score the responses in FILE, one JSON object per line; `-` is stdin, gzip is decompressed.

    A line holds `response` and the fields of its task, at the top level or under `problem`; also
    `turn`, `of`, `spans`, `info`, `id` and `group` where the reward needs them. Every line produces
    one line of output. The exit code is 0 when all lines are scored and 1 when some are not.
    """
    if math.isnan(deadline):  # click.FloatRange accepts nan
        raise SpecError("--deadline nan is not a number of seconds")
    plugin = _build_reward_plugin(name, overrides)
    count = _Count()
    with ExitStack() as stack:
        source = stack.enter_context(_open_response_file(file))
        pool = stack.enter_context(RewardPool(workers, RunnerSpec().reward_memory_mb))
        reads_parent = bool(getattr(plugin, "reads_parent", False))
        lines = read_lines(
            _convert_read_errors(_decompress_lines(source), file),
            response_field,
            reads_parent=reads_parent,
        )
        bar = _Bar(source, stack)
        show = _print_json if as_json else _print_rows
        began = time.monotonic()
        if not as_json:
            print_text(_format_score_row("LINE", "ID", "SCORE", "REASON"))
        for batch in _group_line_batches(plugin, lines):
            scored = list(_score_line_batch(plugin, batch, pool, deadline))
            show(scored)
            count.add(scored)
            bar.show(count.lines)
        seconds = time.monotonic() - began
    sys.stdout.flush()
    print_text(count.describe_counts(seconds), err=True)
    return 1 if count.absent else 0


# The reward ------------------------------------------------------------------------------------


def _build_reward_plugin(name: str, overrides: Sequence[str]) -> RewardPlugin:
    """Builds the reward with its options and runs its own check.

    Raises:
        InvalidSpec: the options do not fit.
        SpecError: `plugin` is set as an option, or the reward's check rejects the options.
        PluginError: the plugin is missing or broken.
        EnvironmentFault: this machine lacks files or packages that the reward reads.
    """
    written = apply_overrides(parse_yaml_document("{}", "--set"), overrides)
    if "plugin" in written.tree:
        raise SpecError("--set plugin=...: the reward is named by --reward")
    try:
        plugin = build_plugin(PluginUse.model_validate({**written.tree, "plugin": name}), "reward")
    except InvalidSpec as error:
        faults = [locate_diagnostic(fault, written) for fault in error.diagnostics]
        raise build_refusal(faults, error.file) from None
    _check_reward_plugin(name, plugin)
    return cast(RewardPlugin, plugin)


def _check_reward_plugin(name: str, plugin: Plugin) -> None:
    try:
        plugin.check()
    except (OSError, ImportError) as error:
        raise EnvironmentFault(
            f"reward plugin {name!r}: {escape_unprintable(str(error))}"
        ) from error
    except ValueError as error:
        raise SpecError(f"reward plugin {name!r}: {escape_unprintable(str(error))}") from error
    except Exception as error:
        what = f"check() failed: {type(error).__name__}: {error}"
        raise PluginError(f"reward plugin {name!r}: {escape_unprintable(what)}") from error


def _group_line_batches(
    plugin: RewardPlugin, lines: Iterable[ResponseLine]
) -> Iterator[list[list[ResponseLine]]]:
    """Yields batches of units (lines that are scored together) that fit into memory."""
    together = plugin.scope != "sample"
    units = group_neighboring_lines(lines) if together else ([line] for line in lines)
    batch: list[list[ResponseLine]] = []
    number = characters = 0
    try:
        for unit in units:
            batch.append(unit)
            number += len(unit)
            characters += sum(len(line.sample.response) for line in unit if line.sample)
            if number >= _LINES or characters >= _CHARACTERS:
                yield batch
                batch, number, characters = [], 0, 0
    except EnvironmentFault:  # first score what was read before the error
        yield batch
        raise
    if batch:
        yield batch


def _score_line_batch(
    plugin: RewardPlugin, batch: Sequence[Sequence[ResponseLine]], pool: RewardPool, deadline: float
) -> Iterator[_ScoredLine]:
    """Yields one result per line, in order."""
    samples = [tuple(line.sample for line in unit if line.sample) for unit in batch]
    outcomes = iter(pool.score([RewardJob(plugin, each, deadline) for each in samples if each]))
    for unit, judged in zip(batch, samples, strict=True):
        outcome = next(outcomes) if judged else None
        verdicts = iter(outcome.verdicts if outcome else ())
        for line in unit:
            if line.sample is None or outcome is None:
                yield _ScoredLine(line, None, line.fault)
            elif outcome.fault is not None:
                yield _ScoredLine(line, None, outcome.fault)
            else:
                verdict = next(verdicts)
                yield _ScoredLine(
                    line, verdict, verdict.reason if verdict else "the reward abstains"
                )


# The file --------------------------------------------------------------------------------------


def _open_response_file(file: str) -> IO[bytes]:
    try:
        return os.fdopen(os.dup(0), "rb") if file == "-" else Path(file).open("rb")
    except OSError as error:
        raise EnvironmentFault(_describe_read_error(file, error)) from error


def _decompress_lines(source: IO[bytes]) -> Iterable[bytes]:
    """Returns the lines of a file, decompressed if its first bytes are those of gzip."""
    packed = cast(BufferedReader, source).peek(2)[:2] == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(source)) if packed else source


def _convert_read_errors(stream: Iterable[bytes], file: str) -> Iterator[bytes]:
    try:
        yield from stream
    except (OSError, EOFError, zlib.error) as error:
        raise EnvironmentFault(_describe_read_error(file, error)) from error


def _describe_read_error(file: str, error: Exception) -> str:
    name = "standard input" if file == "-" else escape_unprintable(file)
    return f"cannot read {name}: {getattr(error, 'strerror', None) or error}"


# Output ----------------------------------------------------------------------------------------


def _print_json(batch: Iterable[_ScoredLine]) -> None:
    print_text("\n".join(format_json(each.to_plain_dict(), allow_nan=False) for each in batch))


def _print_rows(batch: Iterable[_ScoredLine]) -> None:
    rows = []
    for each in batch:
        number = "absent" if each.verdict is None else f"{each.verdict.value:g}"
        parts = each.verdict.parts.items() if each.verdict else ()
        why = [] if each.reason is None else [each.reason]
        details = "  ".join([*why, *(f"{part}={value:g}" for part, value in parts)])
        name = "" if each.line.id is None else str(each.line.id)
        rows.append(_format_score_row(str(each.line.number), name, number, details))
    print_text("\n".join(rows))


def _format_score_row(line: str, name: str, number: str, details: str) -> str:
    """Formats a row, cut to the width of the terminal if there is one."""
    from rich.cells import cell_len, set_cell_size

    name = set_cell_size(escape_unprintable(name), 16)
    row = f"{line:>7}  {name}  {number:>9}  {escape_unprintable(details)}".rstrip()
    width = shutil.get_terminal_size((0, 0)).columns
    if width and cell_len(row) > width:
        row = set_cell_size(row, width - 1) + "…"
    return row


class _Bar:
    """Progress bar on stderr; shown only if stderr is a terminal and stdout is not."""

    def __init__(self, source: IO[bytes], stack: ExitStack) -> None:
        self._source = source
        self._bars: rich.progress.Progress | None = None
        if not sys.stderr.isatty() or sys.stdout.isatty():
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from rlx.cli.console import open_console

        self._total = os.fstat(source.fileno()).st_size if source.seekable() else None
        self._bars = stack.enter_context(
            Progress(
                TextColumn("scoring"),
                BarColumn(),
                TextColumn("{task.fields[lines]} lines", markup=False),
                TimeElapsedColumn(),
                console=open_console(stderr=True),
                redirect_stdout=False,
            )
        )
        self._task = self._bars.add_task("", total=self._total, lines=0)

    def show(self, lines: int) -> None:
        if self._bars is not None:
            done = None if self._total is None else self._source.tell()
            self._bars.update(self._task, completed=done, lines=lines)
