"""How to open MLflow on some runs."""

import shlex
from collections.abc import Sequence

from rlx.record import find_mlflow_link
from rlx_registry import RunRecord

__all__ = ["describe_mlflow_page"]


def describe_mlflow_page(runs: Sequence[RunRecord], names: Sequence[str]) -> str | None:
    """Returns the address that shows runs on their MLflow server, or the command that serves it.

    Args:
        runs: as they are now in the registry.
        names: names for the runs that the command takes.

    Returns:
        None if MLflow has none of the runs.
    """
    link = find_mlflow_link(runs)
    if link is None:
        return None
    return shlex.join(["rlx", "mlflow", *names]) if link.store else link.url
