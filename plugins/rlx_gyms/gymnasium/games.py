"""Opens environments of Gymnasium by name, and writes what they show as text."""

import json
from difflib import get_close_matches
from typing import Any

from rlx_gyms.libraries import import_library

__all__ = ["format_observation", "list_action_names", "open_game", "set_start"]

_ACTIONS = {
    "FrozenLake-v1": ("left", "down", "right", "up"),
    "FrozenLake8x8-v1": ("left", "down", "right", "up"),
    "CliffWalking-v1": ("up", "right", "down", "left"),
    "CliffWalkingSlippery-v1": ("up", "right", "down", "left"),
    "Taxi-v3": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Taxi-v4": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack-v1": ("stick", "hit"),
}
"""Names of actions as in the library's documentation, in the order of their numbers."""


def open_game(id: str, config: str) -> Any:
    """Returns a new environment without the library's checks and limit of steps.

    Args:
        id: the environment's name.
        config: arguments of `gymnasium.make`, as JSON.

    Raises:
        ImportError: the library, or one that the environment needs, is missing.
        ValueError: there is no such environment, it refuses its options, or its actions are not
            discrete.
    """
    library = import_library("gymnasium")
    try:
        game = library.make(id, disable_env_checker=True, **json.loads(config))
    except library.error.DependencyNotInstalled as error:
        raise ImportError(f"{id} of gymnasium: {error}") from error
    except (library.error.Error, TypeError, ValueError, AssertionError, KeyError) as error:
        near = get_close_matches(id, list(library.registry), n=1)
        hint = f"; did you mean {near[0]!r}?" if near and near[0] != id else ""
        raise ValueError(f"gymnasium cannot make {id!r}: {error}{hint}") from error
    if not isinstance(game.action_space, library.spaces.Discrete):
        raise ValueError(f"{id}: its actions are {game.action_space}, not discrete")
    return game.unwrapped


def list_action_names(id: str, count: int) -> tuple[str, ...]:
    """The names of an environment's actions; their numbers if it has none."""
    names = _ACTIONS.get(id, ())
    return names if len(names) == count else tuple(map(str, range(count)))


def set_start(game: Any, start: int | None, seed: int) -> Any:
    """Resets a game, puts it into a state unless that is None, and returns its observation."""
    observation, _ = game.reset(seed=seed)
    if start is None:
        return observation
    game.s = start
    return start


def format_observation(observation: Any) -> str:
    """An observation as text: a number, or numbers with spaces between them."""
    if isinstance(observation, dict):
        return " ".join(f"{k} {format_observation(v)}" for k, v in sorted(observation.items()))
    if isinstance(observation, tuple | list):
        return " ".join(map(format_observation, observation))
    if hasattr(observation, "ravel"):
        return " ".join(f"{value:.4g}" for value in observation.ravel().tolist())
    return str(observation)
