"""Settings of every test."""

import signal

from hypothesis import settings

# Deadlines per example measure the machine, not the code.
settings.register_profile("rlx", deadline=None)
settings.load_profile("rlx")

# A shell that runs the tests in the background lets all that they start ignore interrupts; some
# tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
