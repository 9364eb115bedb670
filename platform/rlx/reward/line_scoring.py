"""Scores lines of responses with a reward plugin, in worker processes."""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal, cast

from rlx.discovery import build_plugin
from rlx.errors import EnvironmentFault, PluginError, SpecError
from rlx.plugin import Plugin, RewardPlugin, Score
from rlx.reward.job import RewardJob
from rlx.reward.response_lines import ResponseLine, group_neighboring_lines, read_lines
from rlx.reward.workers import RewardPool
from rlx.spec import PluginUse, RunnerSpec
from rlx.spec.reading import (
    InvalidSpec,
    apply_overrides,
    build_refusal,
    locate_diagnostic,
    parse_yaml_document,
)
from rlx.text import escape_unprintable

__all__ = ["ScoredLine", "build_reward", "open_response_lines", "score_lines"]

_LINES = 2048  # per batch; files may have millions
_CHARACTERS = 8 << 20


@dataclass(frozen=True, slots=True)
class ScoredLine:
    """The result of one line.

    Attributes:
        line: the line.
        verdict: its score; None without one.
        reason: the reward's explanation of its score, or why there is none.
    """

    line: ResponseLine
    verdict: Score | None
    reason: str | None

    @property
    def status(self) -> Literal["scored", "absent"]:
        """Whether the line has a score."""
        return "absent" if self.verdict is None else "scored"

    def to_plain_dict(self) -> dict[str, Any]:
        """Returns the result as plain JSON values."""
        named = {} if self.line.id is None else {"id": self.line.id}
        return {
            "line": self.line.number,
            **named,
            "status": self.status,
            "score": self.verdict and self.verdict.value,
            "parts": dict(self.verdict.parts) if self.verdict else {},
            "reason": self.reason,
        }


def score_lines(
    plugin: RewardPlugin,
    lines: Iterable[bytes],
    *,
    field: str = "response",
    workers: int = 1,
    deadline: float = 5.0,
) -> Iterator[list[ScoredLine]]:
    """Returns one result per line, in order and in batches that fit into memory.

    Args:
        plugin: made by `build_reward`.
        lines: JSON Lines in UTF-8; empty ones are skipped.
        field: JSON key of the response.
        workers: number of worker processes.
        deadline: time limit of one call, in seconds.

    Raises:
        SpecError: the deadline is not a number of seconds.
    """
    if not deadline > 0:  # or nan
        raise SpecError(f"deadline {deadline} is not a number of seconds")
    reads_parent = bool(getattr(plugin, "reads_parent", False))
    read = read_lines(lines, field, reads_parent=reads_parent)
    return _score_batches(plugin, read, workers, deadline)


def _score_batches(
    plugin: RewardPlugin, read: Iterable[ResponseLine], workers: int, deadline: float
) -> Iterator[list[ScoredLine]]:
    with RewardPool(workers, RunnerSpec().reward_memory_mb) as pool:
        for batch in _group_line_batches(plugin, read):
            yield list(_score_line_batch(plugin, batch, pool, deadline))


def build_reward(name: str, overrides: Sequence[str] = ()) -> RewardPlugin:
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
) -> Iterator[ScoredLine]:
    """Yields one result per line, in order."""
    samples = [tuple(line.sample for line in unit if line.sample) for unit in batch]
    outcomes = iter(pool.score([RewardJob(plugin, each, deadline) for each in samples if each]))
    for unit, judged in zip(batch, samples, strict=True):
        outcome = next(outcomes) if judged else None
        verdicts = iter(outcome.verdicts if outcome else ())
        for line in unit:
            if line.sample is None or outcome is None:
                yield ScoredLine(line, None, line.fault)
            elif outcome.fault is not None:
                yield ScoredLine(line, None, outcome.fault)
            else:
                verdict = next(verdicts)
                yield ScoredLine(
                    line, verdict, verdict.reason if verdict else "the reward abstains"
                )


@contextmanager
def open_response_lines(file: str) -> Iterator[Iterable[bytes]]:
    """Opens a file of JSON Lines; `-` is standard input, and gzip is decompressed.

    Raises:
        EnvironmentFault: the file cannot be read, now or later.
    """
    with _open_response_file(file) as source:
        yield _convert_read_errors(_decompress_lines(source), file)


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
