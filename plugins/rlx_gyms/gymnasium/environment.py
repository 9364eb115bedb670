"""The environment `gymnasium`: a discrete environment of the library, played in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from rlx.plugin import Action, Episode, Reply, StatefulEnvironment
from rlx_gyms.gymnasium.games import (
    format_observation,
    list_action_names,
    open_game,
    set_start,
)
from rlx_gyms.gymnasium.optimum import get_action_values
from rlx_gyms.libraries import NeedsLibrary, import_library

__all__ = ["GymnasiumEnvironment"]


@dataclass(slots=True)
class _Game:
    """An environment of the library with what has happened in it."""

    env: Any
    id: str
    config: str
    observation: Any
    total: float = 0.0


def _build_lake_episode(
    name: str, *turns: str, kinds: tuple[str, ...], observations: tuple[str, ...], done: bool
) -> Episode:
    problem = {
        "id": "FrozenLake-v1",
        "config": '{"is_slippery": false}',
        "start": 14,
        "seed": 0,
    }
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
            "<answer>left</answer>",
            "Right",
            "right",
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

    observation: str = Field("{observation}\n", min_length=1)
    """The text after a turn; `{observation}` is the state as numbers."""
    span: str = "answer"
    """The span with the action; without it the whole turn is the action."""

    def open(self, problem: Mapping[str, Any], seed: int) -> _Game:
        """Opens the problem's environment in the problem's first state."""
        env = open_game(problem["id"], problem["config"])
        observation = set_start(env, problem["start"], problem["seed"])
        env.np_random, _ = import_library("gymnasium.utils.seeding").np_random(seed)
        return _Game(env, problem["id"], problem["config"], observation)

    def play(self, game: _Game, action: Action) -> Reply:
        """Takes one action; a text that names none changes nothing."""
        names = list_action_names(game.id, int(game.env.action_space.n))
        chosen = action.spans.get(self.span, action.text).strip().casefold()
        if chosen not in names:
            shown = f"{format_observation(game.observation)} {'|'.join(names)}"
            return Reply(
                kind="invalid",
                observation=self.observation.replace("{observation}", shown),
                info={"valid": False, "reward": 0.0, "return": game.total},
            )
        number = names.index(chosen)
        info = self._compare_with_optimum(game, number, action.turns_left + 1)
        game.observation, reward, terminated, truncated, _ = game.env.step(number)
        game.total += float(reward)
        shown = format_observation(game.observation)
        ended = bool(terminated or truncated)
        return Reply(
            kind="move",
            observation="" if ended else self.observation.replace("{observation}", shown),
            done=ended,
            info={"valid": True, "reward": float(reward), "return": game.total, **info},
            anchor=shown,
        )

    def _compare_with_optimum(self, game: _Game, number: int, turns: int) -> dict[str, Any]:
        """The optimum of a tabular environment, in the state before the action."""
        values = get_action_values(game.id, game.config, turns)
        if values is None:
            return {}
        row = values[int(game.env.s)]
        return {"value": max(row), "optimal": row[number] >= max(row) - 1e-9}
