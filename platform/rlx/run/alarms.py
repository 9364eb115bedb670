"""What a run's figures warn of while it trains."""

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.record import Recorder
from rlx.spec import EnvironmentRolloutSpec, RolloutSpec

__all__ = ["AlarmWatch", "find_over_querying"]

SUSTAINED = 3
"""Steps in a row that must look alike, and the first steps that a rise is measured from."""
FULL, RISE, REPEATS = 0.85, 1.4, 0.10
"""Share of the turns that are allowed, growth of turns, and share of turns that repeat others."""

_TURNS, _REPEATED = "environment/turns", "environment/info/duplicate"


def find_over_querying(history: Sequence[Mapping[str, float]], max_turns: int) -> str | None:
    """Says when a policy asks its environment for the sake of asking.

    It does when rollouts have come to use nearly all the turns that they may, and either many turns
    repeat earlier ones or turns have become far more than they were, for several steps in a row.

    Args:
        history: figures of the phase's steps so far, from its first.
        max_turns: regular turns of a rollout.

    Returns:
        What was seen and what usually causes it; None while all is well.
    """
    steps = [figures for figures in history if _TURNS in figures]
    if len(steps) < SUSTAINED:
        return None
    first, latest = steps[:SUSTAINED], steps[-SUSTAINED:]
    began = float(np.mean([figures[_TURNS] for figures in first]))
    if not all(_is_over_querying(figures, began, max_turns) for figures in latest):
        return None
    turns = float(np.mean([figures[_TURNS] for figures in latest]))
    repeated = [figures[_REPEATED] for figures in latest if _REPEATED in figures]
    repeats = (
        f", and {np.mean(repeated):.0%} of its queries repeat earlier ones" if repeated else ""
    )
    return (
        f"over-querying: a rollout now takes {turns:.1f} of {max_turns} turns, from {began:.1f} in "
        f"the phase's first steps{repeats}. Usually each further turn pays: turn rewards are "
        "summed, not averaged (credit.turn_reduce: mean averages them), or a repeated query is "
        "rewarded like a new one"
    )


def _is_over_querying(figures: Mapping[str, float], began: float, max_turns: int) -> bool:
    turns, repeated = figures[_TURNS], figures.get(_REPEATED)
    repeats = repeated is not None and repeated >= REPEATS
    return turns >= FULL * max_turns and (repeats or turns >= RISE * began)


class AlarmWatch:
    """Looks at a phase's figures as they come, and sounds its alarm once.

    Args:
        rollout: the phase's schedule; those without an environment have nothing to watch.
    """

    def __init__(self, rollout: RolloutSpec) -> None:
        self._max_turns = rollout.max_turns if isinstance(rollout, EnvironmentRolloutSpec) else None
        self._history: list[Mapping[str, float]] = []

    def look(self, figures: Mapping[str, float], recorder: Recorder | None) -> None:
        """Takes the figures of a step; the recorder, where there is one, is told of an alarm."""
        if self._max_turns is None:
            return
        self._history.append(figures)
        told = find_over_querying(self._history, self._max_turns)
        if told is None:
            return
        self._max_turns = None
        if recorder is not None:
            recorder.event("over_querying", told, level="warning")
            print(told, flush=True)
