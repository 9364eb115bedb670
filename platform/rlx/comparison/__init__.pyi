from .comparable import select_newest_runs
from .recipes import Comparison, ComparisonRow, SuiteDifferences, compare_recipes, find_named_runs
from .run_sides import DiffSide, find_side_differences, load_diff_side
from .tables import (
    build_comparison_json,
    build_comparison_tables,
    describe_exclusions,
    format_comparison_csv,
    format_comparison_markdown,
    list_comparison_notes,
    render_comparison_html,
)

__all__ = [
    "Comparison",
    "ComparisonRow",
    "DiffSide",
    "SuiteDifferences",
    "build_comparison_json",
    "build_comparison_tables",
    "compare_recipes",
    "describe_exclusions",
    "find_named_runs",
    "find_side_differences",
    "format_comparison_csv",
    "format_comparison_markdown",
    "list_comparison_notes",
    "load_diff_side",
    "render_comparison_html",
    "select_newest_runs",
]
