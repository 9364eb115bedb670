"""The plain table of a plan's summaries, and sizes of memory."""

from rich import box
from rich.table import Table

__all__ = ["build_summary_table", "format_memory_size"]


def format_memory_size(count: float) -> str:
    """Formats bytes with a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def build_summary_table(title: str, *heads: str) -> Table:
    """Builds an empty table; the columns after the first are right-justified."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        show_header=any(heads),
        header_style="dim",
        padding=(0, 2, 0, 0),
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
    )
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=head != "scores")
    return table
