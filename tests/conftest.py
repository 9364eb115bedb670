"""Settings of every test."""

from hypothesis import settings

# Deadlines per example measure the machine, not the code.
settings.register_profile("rlx", deadline=None)
settings.load_profile("rlx")
