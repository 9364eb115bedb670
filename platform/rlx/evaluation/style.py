"""Style and output of plots.

Colours are from the Okabe-Ito palette, which is safe for colour-blind readers; every plot is also
readable in grey. Figures use Matplotlib's object-oriented API, so nothing here touches pyplot's
global state or needs a display.
"""

from pathlib import Path
from typing import Any

__all__ = [
    "BLUE",
    "FAINT",
    "GRID",
    "INK",
    "ORANGE",
    "SERIES",
    "build_figure",
    "save_figure",
    "style_axes",
]

BLUE, ORANGE = "#0072B2", "#D55E00"
SERIES = ("#009E73", BLUE, ORANGE, "#CC79A7", "#56B4E9", "#E69F00")
"""Line colours of one panel, in order."""
INK, FAINT, GRID = "#262626", "#767676", "#E4E4E4"


def build_figure(width: float, height: float, **padding: Any) -> Any:
    """Creates an empty white figure.

    Args:
        width, height: size in inches.
        padding: options of Matplotlib's constrained layout.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(**padding)
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def style_axes(axes: Any) -> None:
    """Removes the box of the axes and adds a faint grid behind the data."""
    axes.set_facecolor("white")
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK, length=3)


def save_figure(drawn: Any, path: Path) -> tuple[Path, Path]:
    """Writes a figure as `.png` and `.svg`, which replace the suffix of `path`."""
    from matplotlib import rc_context

    stem = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg"))
    drawn.savefig(png, dpi=160)
    drawn.set_layout_engine("none")  # the first save has computed the layout
    # No date and no random ids, so that equal figures give equal files.
    with rc_context({"svg.hashsalt": stem.name}):
        drawn.savefig(svg, metadata={"Date": None})
    return png, svg
