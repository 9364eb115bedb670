"""Checks for the settings of sampling engines.

Plugin authors: call `check_sampler` with the plugin, or use `sampler_checks`. A run itself checks,
after every update, that the engine samples from the learner's policy.
"""

from typing import Any

from rlx.testing.promise import PromiseCheck, common_checks, implementation_check, run_checks

__all__ = ["check_sampler", "sampler_checks"]


def check_sampler(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `SamplerPlugin` keeps them all."""
    run_checks(sampler_checks(), plugin)


def sampler_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for the settings of sampling engines."""
    return (*common_checks(), implementation_check("module:function"))
