"""What plugins print: shown line by line with its origin, and the plugin named where it fails."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rlx.errors import PluginError, summarize_error
from rlx.text import escape_unprintable


@contextmanager
def show_plugin_output(name: str) -> Iterator[None]:
    """Sends what Python code prints in the block to stderr, line by line, each with its origin.

    What a plugin prints may repeat the model's text, so it is escaped, and stdout holds only
    results. Programs that a plugin starts write to the process's own streams.
    """
    out, err = sys.stdout, sys.stderr
    if err is None:  # the process was started without it
        yield
        return
    stream = _PluginStream(name, err.stream if isinstance(err, _PluginStream) else err)
    sys.stdout = sys.stderr = stream
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        stream.end_line()


@contextmanager
def blame_plugin(
    kind: str, name: str, what: str, lets_pass: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Runs a plugin's code: shows its output, and raises a `PluginError` with its name where it
    fails. Exceptions that `lets_pass` names are its answer."""
    try:
        with show_plugin_output(name):
            yield
    except lets_pass:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {summarize_error(error)}"
        raise PluginError(f"{kind} plugin {name!r} failed on {what}: {why}") from error


class _PluginStream(io.TextIOBase):
    """Writes whole lines, escaped, with the plugin's name before each."""

    _LONGEST = 10_000
    """Characters after which a line is written in parts."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self.stream = stream
        # Where progress bars go on being drawn: below rich's own proxy, which prints through them.
        self.rich_proxied_file = getattr(stream, "rich_proxied_file", stream)
        self._name, self._line = escape_unprintable(name), ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for part in text.splitlines(keepends=True):
            self._line += part
            if part.endswith(("\n", "\r")) or len(self._line) > self._LONGEST:
                self.end_line()
        return len(text)

    def end_line(self) -> None:
        line, self._line = self._line.rstrip("\r\n"), ""
        if line:
            with suppress(OSError):  # the log's disk may be full
                self.stream.write(f"{self._name}: {escape_unprintable(line)}\n")
                self.stream.flush()
