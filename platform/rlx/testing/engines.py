"""Promises of samplers and launchers."""

from typing import Any

from rlx.testing.promise import PromiseCheck, common_checks, implementation_check, run_checks


def check_sampler(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `SamplerPlugin` keeps them all."""
    run_checks(sampler_checks(), plugin)


def sampler_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for the settings of sampling engines."""
    return (*common_checks(), implementation_check("module:function"))


def check_launcher(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `LauncherPlugin` keeps them
    all."""
    run_checks(launcher_checks(), plugin)


def launcher_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for the settings of launchers."""
    return (*common_checks(), implementation_check("module:Class"))
