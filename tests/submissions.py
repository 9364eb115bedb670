"""Runs that are submitted by hand, with nothing in them but what a test is about."""

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
