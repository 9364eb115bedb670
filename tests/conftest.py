"""Settings of every test."""

import gc
import signal

from hypothesis import settings

# Deadlines per example measure the machine, not the code.
settings.register_profile("rlx", deadline=None)
settings.load_profile("rlx")

# What the tests import stays to their end: nobody needs to look for garbage in it.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# A shell that runs the tests in the background lets all that they start ignore interrupts; some
# tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
