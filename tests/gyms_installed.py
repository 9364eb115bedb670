"""Skips tests of plugins whose library is missing; in CI that is a failure."""

import os
from importlib.util import find_spec

import pytest

LIBRARIES = {
    "reasoning_gym": "reasoning_gym",
    "reasoning_gym.score": "reasoning_gym",
    "gymnasium": "gymnasium",
    "textarena": "textarena",
}
"""The library that each plugin of rlx_gyms needs."""


def need_library(module: str) -> None:
    """Skips the calling test, or test module, unless a library of the extra `gyms` is installed."""
    if find_spec(module) is None:
        message = f"{module} is not installed: pip install 'rlx[gyms]'"
        if os.environ.get("RLX_CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message, allow_module_level=True)
