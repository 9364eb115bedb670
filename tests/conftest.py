"""Settings of every test."""

import gc
import signal

import pytest
from forked import fork_rlx
from hypothesis import settings

# Deadlines per example measure the machine, not the code. Examples differ from run to run: few at a
# time find as much over the days; --hypothesis-profile=thorough tries many at once.
settings.register_profile("rlx", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("rlx")

# What the tests import stays to their end: nobody needs to look for garbage in it.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-durations",
        type=int,
        metavar="N",
        help="CPU seconds by room, and of the N files and phases of tests that cost most",
    )
    parser.addoption(
        "--forks",
        action="store_true",
        help="starts rlx as copies of a process that has the libraries, not as new interpreters",
    )


def pytest_configure(config: pytest.Config) -> None:
    if longest := config.getoption("--cpu-durations"):
        from cpu import CpuDurations, run_below_adopter

        run_below_adopter()
        config.pluginmanager.register(CpuDurations(longest))
    if config.getoption("--forks"):
        fork_rlx()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# A shell that runs the tests in the background lets all that they start ignore interrupts; some
# tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
