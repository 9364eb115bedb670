"""Steps of a run that gave the policy no gradient."""

from collections.abc import Collection

from sqlalchemy import Connection, and_, or_, select, true

from rlx_registry import models

__all__ = ["IDLE_STEPS", "count_idle_steps"]

IDLE_STEPS = 5
"""Consecutive steps without a gradient after which a run and its pages say so."""
GRADIENT, SILENT_GROUPS = "train/grad_norm", "rollout/zero_signal_"
"""The metric of the gradient's norm, and the prefix of those of the share of groups without signal,
by kind of turn."""


def count_idle_steps(connection: Connection, keys: Collection[int]) -> dict[int, int]:
    """Returns how many of each run's latest steps, without a gap, gave no gradient.

    A step gave one if the norm of its gradient is not 0, or a group has a signal: the policy then
    waits for its critic. A step without metrics could not be scored.

    Args:
        connection: to the registry.
        keys: of the runs.
    """
    run, key, c = models.run.c, models.metric_key.c, models.metric.c
    is_share = key.name.startswith(SILENT_GROUPS, autoescape=True)
    own = and_(c.run_id == run.id, c.key_id == key.id)
    learned = or_(and_(key.name == GRADIENT, c.value != 0), and_(is_share, c.value < 1))
    # Seeks by run and metric; a join would scan every step of every run.
    first, newest, last = (
        select(c.step).where(own, *condition).order_by(order).limit(1).scalar_subquery()
        for order, condition in ((c.step, ()), (c.step.desc(), ()), (c.step.desc(), (learned,)))
    )
    query = select(run.id, run.step, is_share, first, newest, last)
    query = query.join_from(models.run, models.metric_key, true())
    query = query.where(run.id.in_(list(keys)), or_(key.name == GRADIENT, is_share))
    by_run: dict[int, list[tuple[int | None, bool, int, int, int | None]]] = {k: [] for k in keys}
    for one, *figures in connection.execute(query):
        by_run[one].append(tuple(figures))
    return {one: _count_since_signal(metrics) for one, metrics in by_run.items()}


def _count_since_signal(metrics: Collection[tuple[int | None, bool, int, int, int | None]]) -> int:
    """Counts the steps after the last one with a gradient.

    Args:
        metrics: of one run: its step, and of each metric whether it is a share, its first and
            newest step, and the last that shows a gradient.
    """
    shares = [(first, newest) for _, is_share, first, newest, _ in metrics if is_share and newest]
    if not shares:
        return 0
    newest = max(step or 0 for step, *_ in metrics)
    newest = max(newest, *(later for _, later in shares))
    seen = [last for *_, last in metrics if last is not None]
    return newest - (max(seen) if seen else min(earlier for earlier, _ in shares) - 1)
