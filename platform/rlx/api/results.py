"""Results over runs and responses: compare, diff and score; and the queue of runs."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.comparison import Comparison, compare_recipes, find_side_differences, load_diff_side
from rlx.launch import get_registry_url, open_registry
from rlx.launch import run_queue as work_off
from rlx.reward import build_reward, open_response_lines, score_lines

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["compare", "diff", "run_queue", "score"]


def compare(*names: str, registry: str | None = None) -> Comparison:
    """Compares recipes over their seeds: what they differ in, and their metrics.

    `to_frame()` of the result has one row per suite, metric and recipe.

    Args:
        names: runs, groups, or names of experiments; runs that differ in their seed alone form one
            recipe.
        registry: URL of the registry; None takes that of the command line.

    Raises:
        SpecError: a name is unknown, or none of the runs has finished.
    """
    with open_registry(get_registry_url(registry)) as opened:
        return compare_recipes(opened, names)


def diff(
    one: Path | str, other: Path | str, *, registry: str | None = None
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Returns the settings in which two runs or experiment files differ, by section and path.

    Args:
        one: a run or a file.
        other: a run or a file.
        registry: URL of the registry, as in `compare`.

    Raises:
        SpecError: there is no such run, or a file is invalid.
    """
    url = get_registry_url(registry)
    return find_side_differences(*(load_diff_side(str(side), url) for side in (one, other)))


def score(
    responses: Path | str | Iterable[Mapping[str, Any]],
    reward: str,
    *overrides: str,
    workers: int = 1,
    deadline: float = 5.0,
) -> "pd.DataFrame":
    """Scores responses with a reward plugin, in worker processes.

    Args:
        responses: a file of JSON Lines, or one mapping per response: `response`, and the fields of
            its task.
        reward: name of the plugin.
        overrides: `option=value` of the plugin.
        workers: number of worker processes.
        deadline: time limit of one call, in seconds.

    Returns:
        One row per response: `line`, `id`, `status` (`scored` or `absent`), `score`, `reason`, and
        the parts of the score as `parts/NAME`.

    Raises:
        SpecError: the options do not fit.
        PluginError: the plugin is missing or broken.
        EnvironmentFault: the file cannot be read.
    """
    plugin = build_reward(reward, overrides)
    if isinstance(responses, Path | str):
        with open_response_lines(str(responses)) as lines:
            scored = [*score_lines(plugin, lines, workers=workers, deadline=deadline)]
    else:
        encoded = (json.dumps(dict(one)).encode() for one in responses)
        scored = [*score_lines(plugin, encoded, workers=workers, deadline=deadline)]
    from rlx.api.frames import build_score_frame

    return build_score_frame(line.to_plain_dict() for batch in scored for line in batch)


def run_queue(*, at_once: int = 1, registry: str | None = None) -> None:
    """Runs queued runs, oldest first, and takes over lost ones, until nothing is left to do.

    Args:
        at_once: number of runs at a time.
        registry: URL of the registry, as in `compare`.
    """
    url = get_registry_url(registry)
    with open_registry(url, read_only=False) as opened:
        work_off(opened, url, at_once, once=True)
