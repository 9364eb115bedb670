"""Who multiplies on the CPU in a run: chosen by a trial at its start, and kept by its attempts."""

import json
from dataclasses import asdict

from rlx.home import RunFolder
from rlx.learner import Ranks
from rlx.model import ProductChoice, choose_products

__all__ = ["keep_products"]


def keep_products(folder: RunFolder, ranks: Ranks) -> ProductChoice:
    """Returns the run's choice, the same on every rank and in every attempt.

    A GPU multiplies by itself. A run that has checkpoints but no choice is of a version that had
    none, and goes on with torch's products.
    """
    if ranks.device.type != "cpu":
        return ProductChoice()
    choice, *_ = ranks.gather(_read_or_choose(folder) if ranks.is_first else ProductChoice())
    return choice


def _read_or_choose(folder: RunFolder) -> ProductChoice:
    if folder.products.exists():
        return ProductChoice(**json.loads(folder.products.read_text()))
    if folder.checkpoints.exists() and any(folder.checkpoints.iterdir()):
        return ProductChoice()
    choice = choose_products()
    aside = folder.products.with_suffix(".new")
    aside.write_text(json.dumps(asdict(choice)))
    aside.replace(folder.products)
    return choice
