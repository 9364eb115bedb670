"""Findings in the words that all of them share."""

from rlx.spec import KeyPath
from rlx.spec.reading import Diagnostic
from rlx.text import escape_unprintable

__all__ = ["build_plan_error", "build_plan_warning", "format_quote", "plugin_fault"]

SHOWN = 160
"""Characters of a response that a message shows."""
LONGEST = 300
"""Characters of a plugin's own words."""


def build_plan_error(path: KeyPath, message: str, *helps: str) -> Diagnostic:
    """What no run should begin with."""
    return Diagnostic(kind="conflict", message=message, path=path, helps=helps)


def build_plan_warning(
    path: KeyPath, message: str, *helps: str, against: KeyPath = ()
) -> Diagnostic:
    """What a run may do and its author should know."""
    return Diagnostic(
        kind="conflict",
        message=message,
        path=path,
        helps=helps,
        against=against,
        severity="warning",
    )


def format_quote(text: str) -> str:
    """The beginning of a text that no author of the experiment wrote, in quotation marks."""
    return repr(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


def plugin_fault(
    who: str, why: str, given: str, *, path: KeyPath, handled: str, lenient: bool, stand_ins: bool
) -> Diagnostic:
    """A plugin that failed on what was made up.

    Args:
        who: the plugin, in words.
        why: its fault.
        given: what it was given, in words.
        path: where it is used.
        handled: what `on_error` would let a run do.
        lenient: it does.
        stand_ins: the problems are none of the task's, so a fault proves nothing.
    """
    ends = f"a run ends here; `on_error` would let it {handled}"
    on = "a problem that stands in for the task's own" if stand_ins else "a made-up response"
    return Diagnostic(
        kind="plugin",
        message=f"{who} failed on {on}: {escape_unprintable(why.splitlines()[0][:LONGEST])}",
        path=path,
        notes=(given, "a run goes on, as `on_error` says" if lenient else ends),
        exit_code=3,
        severity="warning" if lenient or stand_ins else "error",
    )
