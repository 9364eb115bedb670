"""Diagnostics of an experiment file, and their text in the style of compilers.

Control characters from a file never reach the text.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from rlx.errors import EnvironmentFault, PluginError, SpecError
from rlx.spec.base import FaultKind, KeyPath
from rlx.text import escape_unprintable, redact_passwords

_OTHER_NAMES = {
    "algorithm": "estimator",
    "bf16": "bfloat16",
    "fp32": "float32",
    "gpu": "cuda",
    "hf": "transformers",
    "huggingface": "transformers",
    "lr": "learning_rate",
    "name": "path",
}
"""What other libraries call some keys and values."""
_WIDEST = 140
"""Maximum characters of a source line to show; longer lines are cut around the location."""


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A range of characters on one line of a source, by its name as the user gave it, or
    `<override>`; lines (of overrides, their numbers) and columns count from 1."""

    file: str
    line: int
    column: int
    width: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnostic:
    """One error or warning.

    Attributes:
        kind: determines the order in a report.
        message: one line, without a final full stop.
        path: the key it is about; empty if it is about the whole file.
        against: a second key it is about, located instead of `path` if the file lacks `path`.
        meant: the valid key or name that an unknown one was probably meant to be.
        helps: what to do about it.
        notes: additional information; each may have several lines.
    """

    kind: FaultKind
    message: str
    path: KeyPath = ()
    against: KeyPath = ()
    meant: str = ""
    position: SourceLocation | None = None
    helps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    severity: Literal["error", "warning"] = "error"

    def __repr__(self) -> str:
        return format_diagnostic(self)

    @property
    def exit_code(self) -> Literal[2, 3, 4]:
        """2 for the spec, 3 for a plugin, 4 for the machine."""
        return 3 if self.kind == "plugin" else 4 if self.kind == "machine" else 2

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values: the attributes, `exit_code`, and the position's `line`."""
        return {
            **asdict(self),
            "path": format_key_path(self.path),
            "against": format_key_path(self.against),
            "line": self.position and self.position.line,
            "exit_code": self.exit_code,
        }


def build_error(
    path: KeyPath, message: str, *helps: str, kind: FaultKind = "conflict", **more: Any
) -> Diagnostic:
    """Returns an error at `path`: no run should start with it. Empty helps are left out."""
    helps = tuple(filter(None, helps))
    return Diagnostic(kind=kind, message=message, path=path, helps=helps, **more)


def build_warning(path: KeyPath, message: str, *helps: str, against: KeyPath = ()) -> Diagnostic:
    """Returns a warning at `path`: a run may go ahead, but its author should know."""
    return replace(build_error(path, message, *helps, against=against), severity="warning")


class InvalidSpec(SpecError):
    """An experiment that cannot run as written: every fault found, in the order of the report,
    which `str()` is."""

    def __init__(self, diagnostics: Iterable[Diagnostic], file: str, done: str = "") -> None:
        self.diagnostics = tuple(diagnostics)
        self.file = file
        super().__init__(format_diagnostic_report(self.diagnostics, file, done))


class InvalidPlugins(InvalidSpec, PluginError):
    """The spec is valid, but plugins that it names are missing or broken."""

    exit_code = 3


class InvalidMachine(InvalidSpec, EnvironmentFault):
    """The spec is valid, but this machine lacks something that it needs."""

    exit_code = 4


_REFUSALS = {2: InvalidSpec, 3: InvalidPlugins, 4: InvalidMachine}


def build_refusal(diagnostics: Sequence[Diagnostic], file: str) -> InvalidSpec:
    """Returns the exception for these faults, each once, by kind and then by location. Its type
    follows the lowest exit code among them."""

    def get_rank(fault: Diagnostic) -> tuple[int, int, int]:
        at = (fault.position.line, fault.position.column) if fault.position else (0, 0)
        return get_args(FaultKind).index(fault.kind), *at

    ordered = sorted(dict.fromkeys(diagnostics), key=get_rank)
    return _REFUSALS[min(d.exit_code for d in ordered)](ordered, file)


def format_key_path(path: KeyPath) -> str:
    """Formats `("phases", 0, "steps")` as `phases.0.steps`."""
    return ".".join(map(str, path))


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that `word` is another name of, is a part of, or is similar to, or None.

    For example `cuda` for `gpu`, and `cosine` for `cosine_restarts`.
    """
    from difflib import get_close_matches  # imported only after an error

    folded = {choice.lower(): choice for choice in choices}
    given = word.lower()
    parts = re.split(r"[\W_]+", given)
    likely = [_OTHER_NAMES.get(given, ""), *get_close_matches(given, folded, n=1, cutoff=0.8)]
    likely += [*parts, *get_close_matches(given, folded, n=1, cutoff=0.6)]
    return next((folded[one] for one in likely if one in folded), None)


def suggest_name(word: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Returns the help for a name that is not one of `choices`: the closest, else `otherwise`."""
    near = did_you_mean(word, choices)
    return f"did you mean '{near}'?" if near else otherwise


def _format_excerpt(position: SourceLocation) -> tuple[str, str]:
    """Returns the source line, cut to a readable length, and the line of carets below it."""
    from rich.cells import cell_len  # imported only after an error

    text, start = redact_passwords(position.text), position.column - 1
    first = max(0, start - _WIDEST // 2) if len(text) > _WIDEST else 0
    last = first + _WIDEST
    before = ("…" if first else "") + escape_unprintable(text[first:start])
    marked = escape_unprintable(text[start : min(start + position.width, last)])
    after = escape_unprintable(text[start + position.width : last]) + (
        "…" if len(text) > last else ""
    )
    line = (before + marked + after).rstrip()
    return line, " " * cell_len(before) + "^" * max(1, cell_len(marked))


def format_diagnostic(diagnostic: Diagnostic, file: str | None = None) -> str:
    """Returns the diagnostic as plain text of several lines, without a final newline; `file` is
    shown if it has no position."""
    position = diagnostic.position
    lines = [f"{diagnostic.severity}: {escape_unprintable(diagnostic.message)}"]
    margin = "  "
    if position is not None:
        line, carets = _format_excerpt(position)
        margin = " " * (len(str(position.line)) + 1)
        lines.append(f"  --> {escape_unprintable(str(position))}")
        lines.append(f"{margin} |")
        lines.append(f" {position.line} | {line}".rstrip())
        lines.append(f"{margin} | {carets}")
    elif file is not None:
        lines.append(f"  --> {escape_unprintable(file)}")
    for label, texts in (("help", diagnostic.helps), ("note", diagnostic.notes)):
        head = f"{margin} = {label}: "
        for text in texts:
            first, *rest = [escape_unprintable(line) for line in text.splitlines()] or [""]
            lines += [head + first, *(" " * len(head) + line for line in rest)]
    return "\n".join(lines)


@contextmanager
def label_refusal(done: str) -> Iterator[None]:
    """Sets the verb in the closing line ("Nothing was evaluated.", none if empty) of an
    `InvalidSpec` raised in the block or in the decorated function."""
    try:
        yield
    except InvalidSpec as error:
        raise type(error)(error.diagnostics, error.file, done) from error.__cause__


def count_errors(diagnostics: Iterable[Diagnostic]) -> str:
    """Returns "1 error", "2 errors" and so on; warnings do not count."""
    errors = sum(d.severity == "error" for d in diagnostics)
    return "1 error" if errors == 1 else f"{errors} errors"


def format_diagnostic_report(diagnostics: Sequence[Diagnostic], file: str, done: str = "") -> str:
    """Returns all diagnostics of one file and a closing line that counts them, and adds "Nothing
    was {done}." unless it is empty."""
    seen: set[str] = set()  # notes are shown once, such as the names of all plugins
    told = []
    for one in diagnostics:
        new = replace(one, notes=tuple(note for note in one.notes if note not in seen))
        told.append(format_diagnostic(new, file))
        seen.update(one.notes)
    closing = f"{escape_unprintable(file)}: {count_errors(diagnostics)}"
    return "\n\n".join([*told, closing + (f". Nothing was {done}." if done else "")])
