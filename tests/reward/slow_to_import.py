"""Takes a second to import."""

import time

time.sleep(1)  # scenario
