"""Has every process that finds this folder on its path take its time from a clock that a test sets
forward: see `ForwardClock` of tests/patience.py."""

import os
import time
from pathlib import Path

from rlx import stopwatch

_FORWARD = Path(os.environ["RLX_TEST_FORWARD"])

stopwatch.CLOCK = stopwatch.Clock(now=lambda: time.monotonic() + float(_FORWARD.read_text()))
