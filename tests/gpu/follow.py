"""Follows a run: prints its figures as they are recorded, and what held memory if it ran out."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

from figures import print_figure

from rlx.api import Run
from rlx.errors import RlxError
from rlx.home import RunFolder

__all__ = ["follow_run", "summarize_snapshot"]

EVERY = 2.0
"""Seconds between two looks."""
LISTED = 12
"""Allocations that are named, the largest first."""
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
        _print_snapshot(run)
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


def _print_snapshot(run: Run) -> None:
    """Prints what held memory, if the run has written a snapshot."""
    path = RunFolder(Path(run.record.directory or "")).memory_snapshot
    if path.exists():
        with path.open("rb") as file:
            print_figure("memory at the error", **summarize_snapshot(pickle.load(file)))


def summarize_snapshot(snapshot: dict[str, Any]) -> dict[str, Any]:
    """GiB that were allocated, that were held in reserve, and the lines that allocated most.

    Args:
        snapshot: of `torch.cuda.memory._snapshot`.
    """
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    free = 0
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                free = max(free, block["size"])
                continue
            line = _find_line(block.get("frames", ()))
            sizes[line] += block["size"]
            counts[line] += 1
    return {
        "allocated_gib": sizes.total() / 2**30,
        "reserved_gib": sum(s["total_size"] for s in snapshot["segments"]) / 2**30,
        "largest_free_gib": free / 2**30,
        "by_line": [
            {"line": line, "gib": size / 2**30, "blocks": counts[line]}
            for line, size in sizes.most_common(LISTED)
        ],
    }


def _find_line(frames: Any) -> str:
    """The innermost line outside torch, without the path of its package."""
    for frame in frames:
        parts = Path(frame["filename"]).parts
        if frame["filename"].endswith(".py") and "torch" not in parts:
            return f"{'/'.join(parts[-2:])}:{frame['line']} {frame['name']}"
    return "unknown"
