"""The matmul library of a run: chosen by a trial at its start, kept by all its attempts."""

import json
from dataclasses import asdict

from rlx.home import RunFolder
from rlx.learner import Ranks
from rlx.model import MatmulChoice, choose_matmul

__all__ = ["keep_matmul"]


def keep_matmul(folder: RunFolder, ranks: Ranks) -> MatmulChoice:
    """Returns the run's choice, the same on every rank and in every attempt.

    On a GPU it is torch. A run that has checkpoints but no choice comes from a version that had
    none, and goes on with torch.
    """
    if ranks.device.type != "cpu":
        return MatmulChoice()
    choice, *_ = ranks.gather(_read_or_choose(folder) if ranks.is_first else MatmulChoice())
    return choice


def _read_or_choose(folder: RunFolder) -> MatmulChoice:
    if folder.matmul.exists():
        return MatmulChoice(**json.loads(folder.matmul.read_text()))
    if folder.checkpoints.exists() and any(folder.checkpoints.iterdir()):
        return MatmulChoice()
    choice = choose_matmul()
    aside = folder.matmul.with_suffix(".new")
    aside.write_text(json.dumps(asdict(choice)))
    aside.replace(folder.matmul)
    return choice
