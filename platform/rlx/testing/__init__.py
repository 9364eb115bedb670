"""Conformance checks for plugins, to run standalone or as part of a plugin's own tests.

`check_reward`, `check_task` and their counterparts raise AssertionError at the first promise that
is broken. `reward_checks()` and its counterparts return the checks one by one, by name:

    @pytest.mark.parametrize("check", reward_checks(), ids=str)
    def test_keeps_every_promise(check):
        check(my_reward)

`rlx plugins check NAME` runs the same checks on a plugin that is installed or in a file.
"""

from importlib import import_module
from typing import Any

from rlx.discovery import Kind
from rlx.testing.environments import check_environment, environment_checks
from rlx.testing.promise import (
    PromiseCheck,
    check_launcher,
    check_sampler,
    check_tracker,
    first_import,
    launcher_checks,
    required_options,
    sampler_checks,
    tracker_checks,
)
from rlx.testing.rewards import check_reward, reward_checks
from rlx.testing.schedules import check_schedule, schedule_checks
from rlx.testing.tasks import check_task, task_checks

__all__ = [
    "PromiseCheck",
    "check_environment",
    "check_estimator",
    "check_launcher",
    "check_mask",
    "check_placement",
    "check_reward",
    "check_sampler",
    "check_schedule",
    "check_task",
    "check_tracker",
    "environment_checks",
    "estimator_checks",
    "example_batch",
    "example_inputs",
    "first_import",
    "launcher_checks",
    "list_plugin_checks",
    "mask_checks",
    "placement_checks",
    "required_options",
    "reward_checks",
    "sampler_checks",
    "schedule_checks",
    "task_checks",
    "tracker_checks",
]

_WITH_TORCH = {
    "check_estimator": "estimators",
    "estimator_checks": "estimators",
    "example_inputs": "estimators",
    "check_mask": "masks",
    "example_batch": "masks",
    "mask_checks": "masks",
    "check_placement": "estimators",
    "placement_checks": "estimators",
}


def list_plugin_checks(kind: Kind) -> tuple[PromiseCheck, ...]:
    """The checks for a kind of plugin, in the order in which to run them."""
    checks: tuple[PromiseCheck, ...] = getattr(import_module(__name__), f"{kind}_checks")()
    return checks


def __getattr__(name: str) -> Any:
    """Imports the names that need torch on first access: authors of rewards and tasks need none."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
