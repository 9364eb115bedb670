"""Checks that nothing in an experiment is against self-play."""

from collections.abc import Iterator

from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec
from rlx.spec.reading import Diagnostic, build_error

__all__ = ["check_self_play"]


def check_self_play(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields settings of the rollout that self-play cannot have."""
    rollout = spec.rollout
    if not isinstance(rollout, EnvironmentRolloutSpec) or rollout.self_play is None:
        return
    for key, why in (
        ("forced_answer", "a turn after the last one would be one player's alone"),
        ("curriculum", "what one copy of the policy wins, the other loses: success says nothing"),
        ("dynamic_sampling", "it would drop the rollouts of one player of a game"),
    ):
        if getattr(rollout, key) is not None:
            yield build_error(
                ("rollout", key),
                f"rollout.{key} does not go with rollout.self_play: {why}",
                "drop one of them",
                against=("rollout", "self_play"),
            )
