"""Words for a plugin that failed on synthetic rollouts."""

from rlx.spec import KeyPath
from rlx.spec.reading import Diagnostic
from rlx.text import escape_unprintable

__all__ = ["build_plugin_fault", "format_quote"]

SHOWN = 160
"""Characters of a response that a message quotes."""
LONGEST = 300
"""Maximum characters of a plugin's own message."""


def format_quote(text: str) -> str:
    """Quotes the beginning of untrusted text."""
    return repr(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


def build_plugin_fault(
    who: str,
    why: str,
    plugin_input: str,
    *,
    path: KeyPath,
    handled: str,
    lenient: bool,
    stand_ins: bool,
) -> Diagnostic:
    """Builds the finding for a plugin that failed on a synthetic rollout.

    Args:
        who: the plugin, in words.
        why: its fault.
        plugin_input: its input, in words.
        path: where the spec names it.
        handled: the `on_error` setting with which a run would continue.
        lenient: `on_error` already lets a run continue.
        stand_ins: the problems are placeholders, so a fault proves nothing.
    """
    ends = f"a run would fail here; `on_error` would let it {handled}"
    on = "a placeholder problem" if stand_ins else "a synthetic response"
    return Diagnostic(
        kind="plugin",
        message=f"{who} failed on {on}: {escape_unprintable(why.splitlines()[0][:LONGEST])}",
        path=path,
        notes=(plugin_input, "a run would continue, as `on_error` is set" if lenient else ends),
        severity="warning" if lenient or stand_ins else "error",
    )
