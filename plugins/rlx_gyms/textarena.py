"""Games of TextArena: the environment `textarena`, and the task with their beginnings."""

import io
import json
import pickle
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy
from pydantic import Field, model_validator

from rlx.plugin import Action, Demonstration, Episode, Problem, Reply, Split, StatefulEnvironment
from rlx_gyms.libraries import (
    ATTEMPTS,
    GymTask,
    NeedsLibrary,
    import_library,
    is_installed,
    suggest_name,
)


def open_game(id: str, config: str, players: int, seed: int) -> Any:
    """Returns a game that has begun, without the library's wrappers; `config` is JSON.

    `first_player` of the game is the number of the player whose turn is first, mostly 0.
    """
    with mute():
        library = import_library("textarena")
        registry = import_library("textarena.envs.registration").ENV_REGISTRY
        name = f"{id}-raw"
        if name not in registry:
            names = [known.removesuffix("-raw") for known in registry if known.endswith("-raw")]
            hint = suggest_name(id, names, f"there are {len(names)}")
            raise ValueError(f"textarena has no game {id!r}; {hint}")
    with mute(), _seed_generators(seed):
        try:
            game = library.make(name, **json.loads(config))
            game.reset(num_players=players, seed=seed)
        except Exception as error:  # games raise whatever they like
            why = f"{type(error).__name__}: {error}"
            if type(error) is LookupError:  # of nltk, with a page of advice
                why = "it needs a corpus of nltk: python -m nltk.downloader words"
            raise ValueError(f"textarena cannot open {id!r}: {why}") from error
    game.first_player = game.state.current_player_id
    return game


def read_observation(game: Any, player: int) -> str:
    """What the game has shown to a player since the last call, without the player's own words."""
    kinds = import_library("textarena").ObservationType
    messages, game.state.observations[player] = game.state.observations[player], []
    return "".join(
        f"{str(text).strip()}\n"
        for sender, text, kind in messages
        if not (kind == kinds.PLAYER_ACTION and sender == player)
    )


def is_invalid(game: Any, player: int) -> bool:
    """Whether a player's last move was invalid."""
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


def mute() -> redirect_stdout[io.StringIO]:
    """Keeps what the library prints away from the output of rlx."""
    return redirect_stdout(io.StringIO())


def _build_episode(
    name: str, game: str, *turns: str, kinds: tuple[str, ...], **options: Any
) -> Episode:
    players = 2 if options else 1
    return Episode(
        name=name,
        problem={"id": game, "config": "{}", "players": players, "seed": 3},
        turns=turns,
        kinds=kinds,
        options=options,
        self_play=bool(options),
    )


_GUESS = "GuessTheNumber-v0"  # the secret is 8
_EPISODES = (
    _build_episode("gold", _GUESS, "[8]", kinds=("move",)),
    _build_episode("hint", _GUESS, "<answer>1</answer>", "8", kinds=("move", "move")),
    _build_episode("hostile", _GUESS, "[" * 10_000, "", kinds=("invalid", "invalid")),
    _build_episode(
        "self-play",
        "TicTacToe-v0",
        *("0", "1", "4", "2", "8"),
        kinds=("move",) * 5,
        opponent=("[0]",),
    ),
)


_MAX_MOVE_CHARACTERS = 1000
"""Characters of a move that a game reads: Python refuses to read a number of 5000 digits."""


class TextArenaEnvironment(NeedsLibrary, StatefulEnvironment):
    """Plays the game that the task `textarena` names. A turn is a move, with or without brackets.

    `info` holds `return`, the reward that the game ends with (0 before), `won`, whether that is 1,
    `valid`, whether the move was, and `cut`, whether the game read only its first 1000 characters.
    With `opponent` the model is the first of two players; in self-play it is both, and `opponent`
    plays held-out games.
    """

    library: ClassVar[str] = "textarena"

    kinds: ClassVar[tuple[str, ...]] = ("move", "invalid")
    self_play: ClassVar[bool] = True
    examples: ClassVar[tuple[Episode, ...]] = _EPISODES

    opponent: tuple[str, ...] = ()
    """Moves of the other player, such as `["[0]", "[1]"]`, which it tries in a random order in each
    turn until one is valid. Empty for games of one player."""
    second_prompt: str = "{observation}"
    """In self-play, how the game's beginning is shown to the second player, as the task's `prompt`
    does for the first; `{observation}` is what the game shows it before the first move."""

    def open(self, problem: Mapping[str, Any], seed: int) -> Any:
        if (problem["players"] == 1) == bool(self.opponent):
            raise ValueError(
                f"the task has `players: {problem['players']}`: the environment's `opponent` lists "
                "the moves of the second player, and only of a second"
            )
        game = open_game(problem["id"], problem["config"], problem["players"], problem["seed"])
        read_observation(game, game.first_player)
        return game

    def play(self, game: Any, action: Action) -> Reply:
        text = action.spans.get("answer", action.text).strip()
        move = text[:_MAX_MOVE_CHARACTERS] if "[" in text else f"[{text[:_MAX_MOVE_CHARACTERS]}]"
        alone, first = action.player is None, game.first_player
        mover = first if action.player in (None, 0) else 1 - first
        if not alone and mover == first and action.number == 1:
            library = import_library("textarena")
            seen = read_observation(game, 1 - first)
            shown = self.second_prompt.replace("{observation}", seen).strip()
            message = (library.GAME_ID, shown, library.ObservationType.GAME_MESSAGE)
            game.state.observations[1 - first] = [message] if shown else []
        with mute():
            done, _ = game.step(move)
            valid = not is_invalid(game, mover)
            while alone and not done and game.state.current_player_id != first:
                done = self._answer(game)
        reader = mover if alone or done else game.state.current_player_id
        return Reply(
            kind="move" if valid else "invalid",
            observation=read_observation(game, reader),
            done=bool(done),
            info={
                **_build_result(game, mover, done=bool(done)),
                "valid": valid,
                "cut": len(text) > _MAX_MOVE_CHARACTERS,
            },
            player=int(reader != first),
            opponent_info={} if alone else _build_result(game, 1 - mover, done=bool(done)),
        )

    def _answer(self, game: Any) -> bool:
        """Makes the opponent's move, the first valid one; returns whether the game has ended."""
        saved, opponent = pickle.dumps(game), 1 - game.first_player
        read_observation(game, opponent)
        moves = list(self.opponent)
        random.shuffle(moves)  # the adapter seeds the generator for each rollout
        for move in moves:
            trial = pickle.loads(saved)
            trial.step(move)
            if not is_invalid(trial, opponent):
                break
        done, _ = game.step(move)
        return bool(done)


def _build_result(game: Any, player: int, *, done: bool) -> dict[str, Any]:
    value = (game.state.rewards or {}).get(player, 0.0)
    total = float(value) if isinstance(value, int | float) else 0.0  # it may be the reason
    return {"return": total, "won": done and total >= 1.0}


class TextArenaTask(NeedsLibrary, GymTask):
    """Beginnings of a game of TextArena, by name: `id: GuessTheNumber-v0`.

    A hash of what the game shows first, or of its seed if that is always the same, decides the
    split. The environment is `textarena`, the reward of a game `info` with `key: return`.
    """

    library: ClassVar[str] = "textarena"

    id: str = "LightsOut-v0"
    """Name of the game, without the suffix of a wrapper."""
    players: int = Field(1, ge=1, le=2)
    """Number of players; the environment's `opponent` plays the second."""
    prompt: str = "{observation}"
    """The prompt; `{observation}` is what the game shows first."""
    moves: tuple[str, ...] = ()
    """Moves that a warm start draws from at random, which teaches their form and nothing else."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if is_installed("textarena"):  # otherwise `check` says so
            open_game(self.id, self.config_text, self.players, 0)
        return self

    def list_candidates(self, split: Split, index: int, seed: int) -> Iterator[tuple[str, Problem]]:
        rng = random.Random(f"textarena/{self.id}/{seed}/{split}/{index}")
        varies = self._show(0) != self._show(1)
        for _ in range(ATTEMPTS):
            drawn = rng.getrandbits(31)
            try:
                shown = self._show(drawn)
            except ValueError:  # some seeds of LightsOut divide by zero
                continue
            identity = shown if varies else str(drawn)
            where = {"config": self.config_text, "players": self.players, "seed": drawn}
            yield (
                identity,
                Problem(
                    id=f"textarena/{self.id}/{zlib.crc32(identity.encode()):08x}/{drawn}",
                    prompt=self.prompt.replace("{observation}", shown),
                    fields={"data_source": self.id, "id": self.id, **where},
                ),
            )

    def _show(self, seed: int) -> str:
        return _show_beginning(self.id, self.config_text, self.players, seed)

    @property
    def demonstrates(self) -> bool:
        return bool(self.moves)

    def lesson(self, index: int, seed: int) -> Problem:
        if not self.moves:
            raise NotImplementedError("task.moves lists the moves of a warm start")
        return super().lesson(index, seed)

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        return Demonstration((self.act(problem, (), (), seed),))

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        if not self.moves:
            raise NotImplementedError("task.moves lists the moves of a warm start")
        return random.Random(f"textarena/act/{seed}/{len(turns)}").choice(self.moves)


@lru_cache(maxsize=4096)
def _show_beginning(id: str, config: str, players: int, seed: int) -> str:
    game = open_game(id, config, players, seed)
    return read_observation(game, game.first_player)
