"""Runs that are submitted by hand, with nothing in them but what a test is about."""

import time

from sqlalchemy import update

from rlx_registry import RolloutIndex, models

NOTHING = {
    "digest": "d",
    "seed": 0,
    "name": "n",
    "spec": {},
    "yaml": "",
    "plugins": [],
    "code": {},
    "environment": {},
}


def submit(registry, **changes):
    """Submits a run; returns it."""
    run, _ = registry.submit(**{**NOTHING, **changes})
    return run


def index_row(number=0, tree=0, **changes):
    """A row of a step's index."""
    plain = {
        "row": number, "parent_row": None, "tree": tree, "group": tree, "turn": "answer",
        "problem_id": f"p{tree}", "reward": 1.0, "advantage": 0.0, "n_tokens": 3,
        "finish_reason": "stop", "preview": f"Text_{number}",
    }  # fmt: skip
    return RolloutIndex(**{**plain, **changes})


def silence(registry, key=1, seconds=3600):
    """Sets a run's heartbeat into the past, as no method of the registry can."""
    with registry.open_writer() as connection:
        change = update(models.run).where(models.run.c.id == key)
        connection.execute(change.values(heartbeat=time.time() - seconds))
