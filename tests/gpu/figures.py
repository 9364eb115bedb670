"""Figures of a part of the check: one line of JSON each, printed as soon as it is known."""

import json
from typing import Any


def print_figure(name: str, /, **figures: Any) -> None:
    """Prints one figure, by its name."""
    print(json.dumps({name: figures}), flush=True)
