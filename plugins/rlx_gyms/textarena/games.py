"""Opens games of TextArena by name, and reads what they show to a player."""

import io
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from typing import Any

import numpy

from rlx_gyms.libraries import import_library

__all__ = ["is_invalid", "mute", "open_game", "read_observation", "reword_observation"]


def open_game(id: str, config: str, players: int, seed: int) -> Any:
    """Returns a game that has begun, without the library's wrappers. Depends only on its arguments.

    Its attribute `first_player` is the number of the player whose turn is first, mostly 0.

    Args:
        id: the game's name, such as `GuessTheNumber-v0`.
        config: options of the game, as JSON.
        players: number of players.
        seed: seed of the game.

    Raises:
        ImportError: the library is missing.
        ValueError: there is no such game, it refuses its options, or it needs what is not there.
    """
    with mute():
        library = import_library("textarena")
        registry = import_library("textarena.envs.registration").ENV_REGISTRY
        name = f"{id}-raw"
        if name not in registry:
            names = [known.removesuffix("-raw") for known in registry if known.endswith("-raw")]
            near = get_close_matches(id, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {len(names)}"
            raise ValueError(f"textarena has no game {id!r}; {hint}")
    with mute(), _seed_generators(seed):
        try:
            game = library.make(name, **json.loads(config))
            game.reset(num_players=players, seed=seed)
        except Exception as error:  # games raise whatever they like
            raise ValueError(f"textarena cannot open {id!r}: {_describe(error)}") from error
    game.first_player = game.state.current_player_id
    return game


def _describe(error: Exception) -> str:
    # nltk raises a plain LookupError with a page of advice.
    if type(error) is LookupError:
        return "it needs a corpus of nltk: python -m nltk.downloader words"
    return f"{type(error).__name__}: {error}"


def read_observation(game: Any, player: int) -> str:
    """What the game has shown to a player since the last call, without the player's own words."""
    kinds = import_library("textarena").ObservationType
    messages, game.state.observations[player] = game.state.observations[player], []
    return "".join(
        f"{str(text).strip()}\n"
        for sender, text, kind in messages
        if not (kind == kinds.PLAYER_ACTION and sender == player)
    )


def reword_observation(game: Any, player: int, template: str) -> None:
    """Rewords what the game has shown to a player since the last call; `{observation}` is that."""
    library = import_library("textarena")
    text = template.replace("{observation}", read_observation(game, player)).strip()
    kind = library.ObservationType.GAME_MESSAGE
    game.state.observations[player] = [(library.GAME_ID, text, kind)] if text else []


def is_invalid(game: Any, player: int) -> bool:
    """Whether the last move was invalid."""
    ended_by_it = game.state.game_info[player].get("invalid_move", False)
    return bool(getattr(game.state, "error_count", 0)) or bool(ended_by_it)


@contextmanager
def _seed_generators(seed: int) -> Iterator[None]:
    """Seeds the global generators that games draw from, and restores them afterwards."""
    before, before_numpy = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        numpy.random.set_state(before_numpy)


@contextmanager
def mute() -> Iterator[None]:
    """Keeps what the library prints away from the output of rlx."""
    with redirect_stdout(io.StringIO()):
        yield
