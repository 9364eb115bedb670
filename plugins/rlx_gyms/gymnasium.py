"""Environments of Gymnasium with discrete actions, as texts, and their exact optimum."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rlx.plugin import Action, Demonstration, Episode, Problem, Reply, Split, StatefulEnvironment
from rlx_gyms.libraries import ATTEMPTS, GymTask, NeedsLibrary, import_library, is_installed

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
    """Returns a new environment without the library's checks and limit of steps; `config` is JSON.

    Raises:
        ImportError: it needs another library.
        ValueError: it cannot be made, or its actions are not discrete.
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
    """An observation as text: numbers with spaces between them, named if it is a mapping."""
    if isinstance(observation, dict):
        named = sorted(observation.items())
        return " ".join(f"{name} {format_observation(value)}" for name, value in named)
    if isinstance(observation, tuple | list):
        return " ".join(map(format_observation, observation))
    if hasattr(observation, "ravel"):
        return " ".join(f"{value:.4g}" for value in observation.ravel().tolist())
    return str(observation)


_Table = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]


def compute_action_values(table: _Table, turns: int) -> list[list[float]]:
    """Returns `[S, A]`, the greatest expected sum of rewards within `turns` turns.

    Q_1(s, a) = E[r]; Q_k(s, a) = E[r + max_b Q_{k-1}(s', b)], without the second term after an end.
    """
    values = [0.0] * len(table)
    action_values: list[list[float]] = [[0.0] * len(table[s]) for s in range(len(table))]
    for _ in range(turns):
        action_values = [
            [
                sum(p * (r + (0.0 if ended else values[s])) for p, s, r, ended in table[state][a])
                for a in sorted(table[state])
            ]
            for state in range(len(table))
        ]
        values = [max(row) for row in action_values]
    return action_values


@lru_cache(maxsize=128)
def get_action_values(id: str, config: str, turns: int) -> list[list[float]] | None:
    """Those of an environment by name; None if it is not tabular."""
    table = getattr(open_game(id, config), "P", None)
    return None if table is None else compute_action_values(table, turns)


@dataclass(slots=True)
class _Game:
    env: Any
    id: str
    config: str
    observation: Any
    total: float = 0.0


def _build_lake_episode(
    name: str, *turns: str, kinds: tuple[str, ...], observations: tuple[str, ...], done: bool
) -> Episode:
    config = '{"is_slippery": false}'
    problem = {"id": "FrozenLake-v1", "config": config, "start": 14, "seed": 0}
    return Episode(
        name=name, problem=problem, turns=turns, kinds=kinds, observations=observations, done=done
    )


class GymnasiumEnvironment(NeedsLibrary, StatefulEnvironment):
    """Plays the environment that the task `gymnasium` names. A turn is the name of an action.

    `info` holds the `reward` of the turn and the `return` so far. Of a tabular environment it also
    holds `value`, the greatest expected return from the turn's state within the turns that were
    left, and `optimal`, whether the action attains it.
    """

    library: ClassVar[str] = "gymnasium"

    kinds: ClassVar[tuple[str, ...]] = ("move", "invalid")
    examples: ClassVar[tuple[Episode, ...]] = (
        _build_lake_episode("gold", "right", kinds=("move",), observations=("",), done=True),
        _build_lake_episode(
            "around",
            *("<answer>left</answer>", "Right", "right"),
            kinds=("move", "move", "move"),
            observations=("13\n", "14\n", ""),
            done=True,
        ),
        _build_lake_episode(
            "hostile",
            "right left",
            "9" * 100_000,
            kinds=("invalid", "invalid"),
            observations=("14 left|down|right|up\n", "14 left|down|right|up\n"),
            done=False,
        ),
    )

    def open(self, problem: Mapping[str, Any], seed: int) -> _Game:
        env = open_game(problem["id"], problem["config"])
        observation = set_start(env, problem["start"], problem["seed"])
        env.np_random, _ = import_library("gymnasium.utils.seeding").np_random(seed)
        return _Game(env, problem["id"], problem["config"], observation)

    def play(self, game: _Game, action: Action) -> Reply:
        names = list_action_names(game.id, int(game.env.action_space.n))
        chosen = action.spans.get("answer", action.text).strip().casefold()
        if chosen not in names:
            return Reply(
                kind="invalid",
                observation=f"{format_observation(game.observation)} {'|'.join(names)}\n",
                info={"valid": False, "reward": 0.0, "return": game.total},
            )
        number = names.index(chosen)
        optimum = {}
        if values := get_action_values(game.id, game.config, action.turns_left + 1):
            row = values[int(game.env.s)]
            optimum = {"value": max(row), "optimal": row[number] >= max(row) - 1e-9}
        game.observation, reward, terminated, truncated, _ = game.env.step(number)
        game.total += float(reward)
        shown = format_observation(game.observation)
        ended = bool(terminated or truncated)
        return Reply(
            kind="move",
            observation="" if ended else f"{shown}\n",
            done=ended,
            info={"valid": True, "reward": float(reward), "return": game.total, **optimum},
            anchor=shown,
        )

    def close(self, game: _Game) -> None:
        game.env.close()


class GymnasiumTask(NeedsLibrary, GymTask):
    """First states of an environment of Gymnasium with discrete actions, such as FrozenLake-v1.

    A tabular environment begins in every state in which an episode goes on, any other where it
    begins itself. A hash of the first observation, which is the prompt, decides the split. The
    environment is `gymnasium`, its return the reward `info` with `key: return`.
    """

    library: ClassVar[str] = "gymnasium"

    id: str = "FrozenLake-v1"
    """Name of the environment, as for `gymnasium.make`."""
    config: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`, such as `{map_name: 8x8}`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if is_installed("gymnasium"):  # otherwise `check` says so
            open_game(self.id, self.config_text)
        return self

    def list_candidates(self, split: Split, index: int, seed: int) -> Iterator[tuple[str, Problem]]:
        rng = random.Random(f"gymnasium/{seed}/{split}/{index}")
        starts = _list_starts(self.id, self.config_text)
        for _ in range(ATTEMPTS):
            start = rng.choice(starts) if starts else None
            drawn = 0 if starts else rng.getrandbits(31)
            shown = _show_start(self.id, self.config_text, start, drawn)
            where = {"config": self.config_text, "start": start, "seed": drawn}
            yield (
                shown,
                Problem(
                    id=f"gymnasium/{self.id}/{shown}",
                    prompt=f"{shown}\n",
                    fields={"data_source": self.id, "id": self.id, **where},
                ),
            )

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        return Demonstration((self.act(problem, (), (), seed),))

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Returns a random action: a warm start teaches the names of actions and nothing else."""
        rng = random.Random(f"gymnasium/act/{seed}/{len(turns)}")
        return rng.choice(_list_actions(self.id, self.config_text))


@lru_cache(maxsize=16)
def _list_actions(id: str, config: str) -> tuple[str, ...]:
    return list_action_names(id, int(open_game(id, config).action_space.n))


@lru_cache(maxsize=16)
def _list_starts(id: str, config: str) -> tuple[int, ...]:
    """The states of a tabular environment in which an episode goes on; () for another."""
    table = getattr(open_game(id, config), "P", None)
    if table is None:
        return ()
    return tuple(
        state
        for state, actions in table.items()
        if any(not ended or s != state for moves in actions.values() for _, s, _, ended in moves)
    )


@lru_cache(maxsize=4096)
def _show_start(id: str, config: str, start: int | None, seed: int) -> str:
    return format_observation(set_start(open_game(id, config), start, seed))
