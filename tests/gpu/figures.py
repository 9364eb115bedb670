"""Figures of a part of the check: one line of JSON each, printed as soon as it is known."""

import json
from typing import Any


def print_figure(name: str, /, **figures: Any) -> None:
    """Prints one figure, by its name."""
    print(json.dumps({name: figures}), flush=True)


def parse_figure(line: str) -> dict[str, dict[str, Any]] | None:
    """The figure of a line of output; None if the line is something else."""
    if not line.startswith('{"'):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    ((_, figures), *more) = found.items()
    return found if isinstance(figures, dict) and not more else None
