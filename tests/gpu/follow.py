"""Follows a run: prints its figures as they are recorded."""

from typing import Any

from figures import print_figure

from rlx.api import Run
from rlx.errors import RlxError

EVERY = 2.0
"""Seconds between two looks."""
WANTED = ("perf/", "sampler/", "train/", "rewards/")


def follow_run(run: Run, *, every: int = 1) -> None:
    """Waits for the end of a run, and prints figures of its steps as they come.

    Args:
        run: that was submitted.
        every: steps between two that are printed; the last one is printed always.

    Raises:
        RlxError: the run did not finish.
    """
    printed: dict[int, dict[str, float]] = {}
    try:
        while True:
            try:
                run.wait(timeout=EVERY)
            except TimeoutError:
                _print_steps(run, printed, every)
            else:
                break
    except RlxError:
        _print_steps(run, printed, 1)
        raise
    _print_steps(run, printed, every)
    for _, row in run.evaluations().iterrows():
        told = row.dropna().to_dict()
        name = f"evaluation {told.pop('label')}, {told.pop('suite')}, step {told.pop('step')}"
        print_figure(name, **{key: value for key, value in told.items() if _is_number(value)})


def _print_steps(run: Run, printed: dict[int, dict[str, float]], every: int) -> None:
    """Prints steps that are new, or have more figures than before."""
    frame = run.metrics()
    for step in frame.index:
        if int(step) % every and step != frame.index[-1]:
            continue
        values = frame.loc[step].dropna().to_dict()
        figures = {name: value for name, value in values.items() if name.startswith(WANTED)}
        if figures and printed.get(int(step)) != figures:
            printed[int(step)] = figures
            print_figure(f"step {int(step)}", **figures)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
