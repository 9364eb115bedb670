"""Warnings derived from a run's metrics during training."""

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.plugin import Environment
from rlx.record import Recorder
from rlx.spec import EnvironmentRolloutSpec, RolloutSpec
from rlx_registry import IDLE_STEPS

__all__ = ["AlarmWatch", "find_invalid_turns", "find_no_gradient", "find_over_querying"]

SUSTAINED = 3
"""Consecutive steps that must show the pattern, and first steps that form the baseline."""
FULL, RISE, REPEATS = 0.85, 1.4, 0.10
"""Thresholds: share of the allowed turns, growth of turns, share of turns that repeat others."""
FEW, MOST = 0.5, 0.8
"""Thresholds of the share of invalid turns: in the first steps, and in the latest."""

_TURNS, _INFO = "environment/turns", "environment/info/"
_INVALID = "environment/turn/invalid"


def find_over_querying(
    history: Sequence[Mapping[str, float]], max_turns: int, repeats: str = ""
) -> str | None:
    """Detects a policy that queries its environment excessively.

    That is the case if, for several steps in a row, rollouts use nearly all allowed turns, and
    either many turns repeat earlier ones or turns have grown far beyond those of the first steps.

    Args:
        history: metrics of the phase's steps so far, from the first.
        max_turns: maximum number of regular turns of a rollout.
        repeats: as `rlx.plugin.Environment.repeats`.

    Returns:
        A message with the observation and its usual cause; None if there is nothing to report.
    """
    steps = [figures for figures in history if _TURNS in figures]
    if len(steps) < SUSTAINED:
        return None
    first, latest = steps[:SUSTAINED], steps[-SUSTAINED:]
    began = float(np.mean([figures[_TURNS] for figures in first]))
    name = _INFO + repeats
    if not all(_is_over_querying(f, began, max_turns, f.get(name)) for f in latest):
        return None
    turns = float(np.mean([figures[_TURNS] for figures in latest]))
    repeated = [figures[name] for figures in latest if name in figures]
    also = f", and {np.mean(repeated):.0%} of the queries repeat earlier ones" if repeated else ""
    return (
        f"over-querying: rollouts now take {turns:.1f} of {max_turns} turns on average, up from "
        f"{began:.1f} at the start of the phase{also}. The usual cause is that every extra "
        "turn earns reward: turn rewards are summed, not averaged (set credit.turn_reduce: mean "
        "to average them), or a repeated query is rewarded like a new one"
    )


def _is_over_querying(
    figures: Mapping[str, float], began: float, max_turns: int, repeated: float | None
) -> bool:
    turns = figures[_TURNS]
    repeats = repeated is not None and repeated >= REPEATS
    return turns >= FULL * max_turns and (repeats or turns >= RISE * began)


def find_invalid_turns(history: Sequence[Mapping[str, float]]) -> str | None:
    """Detects a policy that has learned to take turns that its environment rejects.

    Args:
        history: metrics of the phase's steps so far, from the first. Environments name the kind of
            such turns `invalid`.
    """
    shares = [figures[_INVALID] for figures in history if _INVALID in figures]
    first, latest = shares[:SUSTAINED], shares[-SUSTAINED:]
    if len(shares) < 2 * SUSTAINED or np.mean(first) > FEW or min(latest) < MOST:
        return None
    return (
        f"invalid turns: {np.mean(latest):.0%} of the turns are now invalid, up from "
        f"{np.mean(first):.0%} at the start of the phase. The usual cause is that an invalid turn "
        "earns more than a valid one, for example where every valid turn costs something: compare "
        "what both earn with rlx samples"
    )


def find_no_gradient(step: int, history: Sequence[Mapping[str, float]]) -> str | None:
    """Detects that the latest steps changed nothing: no token of any group had an advantage.

    Args:
        step: number of the latest step.
        history: metrics of the phase's steps so far, from the first.
    """
    latest = history[-IDLE_STEPS:]
    if len(latest) < IDLE_STEPS or not all(map(_has_no_gradient, latest)):
        return None
    return (
        f"no gradient: steps {step - IDLE_STEPS + 1} to {step} changed nothing, as no token had an "
        "advantage. The usual cause is that all responses to a problem score alike: look at them "
        "with rlx samples, and at the credit of each token with rlx plan"
    )


def _has_no_gradient(figures: Mapping[str, float]) -> bool:
    silent = [v for name, v in figures.items() if name.startswith("rollout/zero_signal_")]
    return not figures.get("train/grad_norm") and all(share == 1 for share in silent)


class AlarmWatch:
    """Watches the metrics of a phase and raises an alarm when what it warns of begins.

    Args:
        rollout: the phase's rollout settings.
        environment: the phase's environment; None without one.
    """

    def __init__(self, rollout: RolloutSpec, environment: Environment | None) -> None:
        self._repeats = environment.repeats if environment is not None else ""
        self._max_turns = rollout.max_turns if isinstance(rollout, EnvironmentRolloutSpec) else None
        self._history: list[Mapping[str, float]] = []
        self._raised: set[str] = set()

    def observe_step(
        self, step: int, figures: Mapping[str, float], recorder: Recorder | None
    ) -> None:
        """Adds the metrics of a step; an alarm is recorded if there is a recorder."""
        self._history.append(figures)
        alarms = {"no_gradient": find_no_gradient(step, self._history)}
        if self._max_turns is not None:
            alarms["invalid_turns"] = find_invalid_turns(self._history)
        if self._max_turns is not None and "over_querying" not in self._raised:
            alarms["over_querying"] = find_over_querying(
                self._history, self._max_turns, self._repeats
            )
        for kind, warning in alarms.items():
            if warning is None:
                self._raised.discard(kind)
            elif kind not in self._raised:
                self._raised.add(kind)
                if recorder is not None:
                    recorder.event(kind, warning, level="warning")
                    print(warning, flush=True)
