"""Checks for the settings of sampling engines.

Plugin authors: call `check_sampler` with the plugin, or use `sampler_checks`. A run itself checks,
after every update, that the engine samples from the learner's policy.
"""

from typing import Any

from rlx.discovery import import_implementation
from rlx.errors import RlxError
from rlx.testing.promise import PromiseCheck, build_subject_plugin, common_checks, run_checks

__all__ = ["check_sampler", "sampler_checks"]


def check_sampler(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `SamplerPlugin` keeps them all."""
    run_checks(sampler_checks(), plugin)


def sampler_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for the settings of sampling engines."""
    return (
        *common_checks(),
        PromiseCheck(
            "names a function that can be imported",
            "set `implementation` to 'module:function'",
            _check_implementation,
        ),
    )


def _check_implementation(subject: Any) -> None:
    try:
        import_implementation(type(build_subject_plugin(subject)).implementation)
    except RlxError as error:
        raise AssertionError(str(error)) from error
