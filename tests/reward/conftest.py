"""Workers that score, shared by the tests of a file."""

import sys
from pathlib import Path

import pytest

from rlx.reward import RewardPool

sys.path.insert(0, str(Path(__file__).parent))  # spawned workers inherit it


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=2, memory_mb=256) as pool:
        yield pool
