"""The matmul library of a run: a trial chooses it once per machine, and all attempts keep it.

Two runs on one machine are then equal to the bit, also where the trial finds nearly no difference.
"""

import hashlib
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from rlx.home import RunFolder, locate_cache
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
        return _read_choice(folder.matmul)
    if folder.checkpoints.exists() and any(folder.checkpoints.iterdir()):
        return MatmulChoice()
    choice = _choose_for_machine()
    _write_choice_aside(folder.matmul, choice).replace(folder.matmul)
    return choice


def _choose_for_machine() -> MatmulChoice:
    """The choice of the first run on this machine, from its cache; a trial without one.

    Of runs that start together, one writes it and all read it. A damaged one is written again. A
    run whose machine has no cache that can be written uses its own trial.
    """
    kept = locate_cache() / "matmul" / f"{_identify_machine()}.json"
    unreadable = OSError, ValueError, TypeError
    try:
        return _read_choice(kept)
    except unreadable as error:
        is_damaged = not isinstance(error, OSError)
    choice = choose_matmul()
    with suppress(*unreadable):
        kept.parent.mkdir(parents=True, exist_ok=True)
        aside = _write_choice_aside(kept, choice)
        try:
            if is_damaged:
                kept.unlink(missing_ok=True)
            with suppress(FileExistsError):
                os.link(aside, kept)
        finally:
            aside.unlink()
        return _read_choice(kept)
    return choice


def _identify_machine() -> str:
    """8 hex digits for the processor and the version of torch."""
    processor = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line for line in lines if line.startswith("model name")), processor)
    inputs = [platform.machine(), processor, torch.__version__]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:8]


def _read_choice(path: Path) -> MatmulChoice:
    return MatmulChoice(**json.loads(path.read_text(encoding="utf-8")))


def _write_choice_aside(path: Path, choice: MatmulChoice) -> Path:
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(asdict(choice)), encoding="utf-8")
    return aside
