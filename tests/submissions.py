"""Runs that are submitted by hand, with nothing in them but what a test is about."""

import time

from sqlalchemy import update

from rlx_registry import models

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


def silence(registry, key=1, seconds=3600):
    """Sets a run's heartbeat into the past, as no method of the registry can."""
    with registry.open_writer() as connection:
        change = update(models.run).where(models.run.c.id == key)
        connection.execute(change.values(heartbeat=time.time() - seconds))
