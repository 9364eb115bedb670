"""Steps of a run that gave the policy no gradient."""

from sqlalchemy import Connection, and_, func, or_, select

from rlx_registry import models

__all__ = ["IDLE_STEPS", "count_idle_steps"]

IDLE_STEPS = 5
"""Consecutive steps without a gradient after which a run and its pages say so."""
GRADIENT, SILENT_GROUPS = "train/grad_norm", "rollout/zero_signal_"
"""The metric of the gradient's norm, and the prefix of those of the share of groups without signal,
by kind of turn."""


def count_idle_steps(connection: Connection, key: int) -> int:
    """Returns how many of a run's latest steps, without a gap, gave no gradient.

    A step gave one if the norm of its gradient is not 0, or a group has a signal: the policy then
    waits for its critic. A step without metrics could not be scored.

    Args:
        connection: to the registry.
        key: of the run.
    """
    key_c, c = models.metric_key.c, models.metric.c
    share = key_c.name.startswith(SILENT_GROUPS, autoescape=True)
    learned = or_(and_(key_c.name == GRADIENT, c.value != 0), and_(share, c.value < 1))
    steps = select(func.max(c.step), func.min(c.step)).where(c.run_id == key)
    steps = steps.join_from(models.metric, models.metric_key, c.key_id == key_c.id)
    newest, first = connection.execute(steps.where(share)).one()
    if newest is None:
        return 0
    last = connection.execute(steps.where(learned)).one()[0]
    step = connection.scalar(select(models.run.c.step).where(models.run.c.id == key))
    return int(max(step or 0, newest) - (first - 1 if last is None else last))
