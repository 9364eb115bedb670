"""Tools for tests: good ones, and ones that fail in every way."""

import os
import time
from typing import Literal

PRICES = {"figs": 7, "pears": 4}


def look_up(item: str, currency: Literal["cent", "mark"] = "cent") -> int:
    """Looks up a price.

    Args:
        item: what is sold
        currency: of the price
    """
    return PRICES[item] * (1 if currency == "cent" else 100)


async def add_up(numbers: list[int]) -> int:
    """Adds up.

    Args:
        numbers: any number of them
    """
    return sum(numbers)


def repeat(text: str, times: int) -> str:
    """Repeats a text.

    Args:
        text: what to repeat
        times: how often
    """
    return text * times


def hang(seconds: float) -> None:
    """Waits.

    Args:
        seconds: how long
    """
    time.sleep(seconds)


def die() -> None:
    """Ends its process."""
    os._exit(3)


def undocumented(x: int) -> int:
    return x
