"""Settings of every test.

`make test` is all but tests/system: one process per worker, SQLite, files and threads. `make
test-system` starts servers, browsers and command lines, and kills what it started.
"""

import gc
import signal

import pytest
from hypothesis import settings

# The same examples each time: a change fails for what it does. --hypothesis-profile=thorough tries
# others, and many. A deadline per example would measure the machine, not the code.
settings.register_profile("rlx", derandomize=True, database=None, deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("rlx")

# What the tests import stays to their end: nobody needs to look for garbage in it.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--database",
        choices=["sqlite", "postgresql"],
        default="sqlite",
        help="where registries are; with postgresql the tests that ask for a database, no others",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests of a registry's database to where that database is."""
    server = config.option.database == "postgresql"
    kept, left = [], []
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        system = item.get_closest_marker("system") is not None
        if server:
            is_here = system or not asked.isdisjoint({"blank", "url", "postgres"})
            is_here = is_here and item.get_closest_marker("sqlite") is None
        else:
            is_here = system or "postgres" not in asked
        (kept if is_here else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# A shell that runs the tests in the background lets all that they start ignore interrupts; some
# tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
