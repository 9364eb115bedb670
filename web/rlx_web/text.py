"""Formatting of untrusted text and of values for the page templates."""

import json
import math
import re
import time
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi.templating import Jinja2Templates

SHADES = 8
MAX_TEXT_CHARACTERS = 400
"""Characters of a value shown in a table."""
HIDDEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"})
BLANK = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    r"\U000e0100-\U000e01ef]"
)
"""Invisible characters of other categories: fillers, variation selectors, blank braille."""


def render_visible_text(text: object, line_break: str = "↵\n") -> str:
    """Text with control, bidirectional and zero-width characters made visible, and line breaks
    marked. The template escapes HTML, not this function."""
    return line_break.join(
        line if line.isascii() and line.isprintable() else "".join(map(_show_character, line))
        for line in str(text).split("\n")
    )


def _show_character(character: str) -> str:
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return "␡" if code == 0x7F else chr(0x2400 + code)
    if unicodedata.category(character) in HIDDEN or BLANK.match(character):
        return f"⟨U+{code:04X}⟩"
    return character


def format_figure(value: object) -> str:
    """Four significant digits; a dash for None."""
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:.4g}"
    return render_visible_text(value)


def format_signed_figure(value: float | None) -> str:
    return "—" if value is None else f"{value:+.3g}"


def format_age(at: float | None) -> str:
    if at is None:
        return "—"
    return f"{format_duration(max(0.0, time.time() - at), digits=0)} ago"


def format_clock_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def format_pretty_json(value: object) -> str:
    return render_visible_text(json.dumps(value, indent=2, ensure_ascii=False), "\n")


def build_sparkline_points(
    points: list[tuple[int, float]], width: int = 96, height: int = 20
) -> str:
    """The points of an SVG polyline of `width` × `height` with a margin of two units. A constant
    series lies in the middle: at an edge it would look like an extreme value."""
    steps, values = [p[0] for p in points], [p[1] for p in points]
    across, up = max(steps) - min(steps) or 1, max(values) - min(values)
    return " ".join(
        f"{2 + (s - min(steps)) / across * (width - 4):.1f},"
        f"{height - 2 - ((v - min(values)) / up if up else 0.5) * (height - 4):.1f}"
        for s, v in points
    )


def format_short_value(value: object) -> str:
    """A value of an experiment, on one line; a dash for None."""
    if value is None:
        return "—"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return render_visible_text(
        text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS] + "…"
    )


def format_duration(seconds: float | None, digits: int = 1) -> str:
    if seconds is None:
        return "—"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def render_token_text(text: str) -> str:
    return render_visible_text(text, "⏎\n").replace("\u2409", "⇥")


def get_heat_class(value: float | None, channels: list[dict[str, Any]], name: str) -> str:
    """The CSS class of a value: p1 to p8 above 0, n1 to n8 below; "" for 0 or None."""
    largest = next((c["largest"] for c in channels if c["name"] == name), 0.0)
    if not isinstance(value, int | float) or not math.isfinite(value) or not value * largest:
        return ""
    return f"{'p' if value > 0 else 'n'}{max(1, math.ceil(abs(value) / largest * SHADES))}"


templates = Jinja2Templates(Path(__file__).parent / "templates")
templates.env.autoescape = True
templates.env.globals["now"] = time.time
templates.env.trim_blocks = templates.env.lstrip_blocks = True
templates.env.filters |= {
    "visible": render_visible_text,
    "number": format_figure,
    "signed": format_signed_figure,
    "ago": format_age,
    "clock": format_clock_time,
    "pretty": format_pretty_json,
    "sparkline": build_sparkline_points,
    "short": format_short_value,
    "lasting": format_duration,
    "token": render_token_text,
    "heat": get_heat_class,
}


def list_leaf_values(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Leaf values by dotted path; an empty mapping counts as a leaf."""
    if not isinstance(value, Mapping) or not value:
        return [(path, value)]
    return [
        x
        for name, v in value.items()
        for x in list_leaf_values(v, f"{path}.{name}" if path else name)
    ]
