"""Text for pages. Nearly all of it was written by a model or a user, and none of it is trusted."""

import json
import time
import unicodedata
from pathlib import Path

from fastapi.templating import Jinja2Templates

__all__ = ["templates", "visible"]

HIDDEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"})


def visible(text: object, line_break: str = "↵\n") -> str:
    """Returns text in which nothing is invisible: controls, direction marks, zero-width characters.

    Line breaks stay, and get a mark. Escaping HTML is the template's work, not this function's.
    """
    return "".join(line_break if c == "\n" else _visible(c) for c in str(text))


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return "␡" if code == 0x7F else chr(0x2400 + code)
    if unicodedata.category(character) in HIDDEN:
        return f"⟨U+{code:04X}⟩"
    return character


def number(value: object) -> str:
    """Four significant digits; a dash where there is nothing."""
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:.4g}"
    return visible(value)


def signed(value: float | None) -> str:
    """A difference or an advantage, with its sign."""
    return "—" if value is None else f"{value:+.3g}"


def ago(at: float | None) -> str:
    """How long ago a moment was."""
    if at is None:
        return "—"
    seconds = max(0.0, time.time() - at)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def clock(at: float) -> str:
    """A moment, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def pretty(value: object) -> str:
    """JSON for reading."""
    return visible(json.dumps(value, indent=2, ensure_ascii=False), "\n")


def sparkline(points: list[tuple[int, float]], width: int = 96, height: int = 20) -> str:
    """Returns the points of an SVG polyline that fills `width` × `height`, two units of margin."""
    steps, values = [p[0] for p in points], [p[1] for p in points]
    across, up = max(steps) - min(steps) or 1, max(values) - min(values) or 1.0
    return " ".join(
        f"{2 + (s - min(steps)) / across * (width - 4):.1f},"
        f"{height - 2 - (v - min(values)) / up * (height - 4):.1f}"
        for s, v in points
    )


templates = Jinja2Templates(Path(__file__).parent / "templates")
templates.env.autoescape = True
templates.env.trim_blocks = templates.env.lstrip_blocks = True
templates.env.filters |= {
    f.__name__: f for f in (visible, number, signed, ago, clock, pretty, sparkline)
}
