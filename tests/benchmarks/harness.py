"""What every benchmark shares: two sides timed in turns, and the lines of bench.json."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a piece of work, of every thread's CPU and by the clock."""

    cpu: float
    wall: float


def spent(work: Callable[[], object]) -> Spent:
    """What one call costs this process."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Spent(time.process_time() - cpu, time.perf_counter() - wall)


def in_turns(sides: Mapping[str, Callable[[], Spent]], rounds: int) -> dict[str, list[Spent]]:
    """What each side spends in each round, one after the other; a first round does not count."""
    kept: dict[str, list[Spent]] = {name: [] for name in sides}
    for _ in range(1 + rounds):
        for name, side in sides.items():
            kept[name].append(side())
    return {name: took[1:] for name, took in kept.items()}


def row(
    name: str, values: Sequence[float], baseline: str, unit: str, **more: float
) -> dict[str, object]:
    """One line of bench.json: median, lowest and highest, and what else there is to say."""
    return {
        "name": name,
        "ratio": round(statistics.median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
        "baseline": baseline,
        "unit": unit,
        **{key: round(value, 4) for key, value in more.items()},
    }


def compared(
    name: str, theirs: Sequence[Spent], ours: Sequence[Spent], baseline: str
) -> dict[str, object]:
    """How many times the CPU time of ours theirs is, round by round; `wall` is the same by the
    clock, and `milliseconds` are ours, of CPU."""
    rounds = list(zip(theirs, ours, strict=True))
    return row(
        name,
        [their.cpu / own.cpu for their, own in rounds],
        beside(baseline, [their.cpu for their in theirs]),
        "times as fast",
        wall=statistics.median(their.wall / own.wall for their, own in rounds),
        milliseconds=1e3 * statistics.median(own.cpu for own in ours),
    )


def beside(baseline: str, seconds: Sequence[float]) -> str:
    """What ours is compared with, and the time that took in the middle round."""
    milliseconds = 1e3 * statistics.median(seconds)
    return f"{baseline}, {milliseconds:.{0 if milliseconds >= 100 else 1}f} ms"
