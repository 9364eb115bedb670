"""Checks for the settings of launchers.

Plugin authors: call `check_launcher` with the plugin, or use `launcher_checks`. What the launcher
starts is tested on the machines that it is for.
"""

from typing import Any

from rlx.testing.promise import PromiseCheck, common_checks, implementation_check, run_checks

__all__ = ["check_launcher", "launcher_checks"]


def check_launcher(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `LauncherPlugin` keeps them
    all."""
    run_checks(launcher_checks(), plugin)


def launcher_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for the settings of launchers."""
    return (*common_checks(), implementation_check("module:Class"))
