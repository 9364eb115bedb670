"""Episodes that the environment `textarena` promises: one of every game that a player can open."""

from rlx.plugin import Episode

__all__ = ["EPISODES", "SINGLE_PLAYER"]

SINGLE_PLAYER = {
    "2048-v0": "[Left]",
    "Bandit-v0": "[red]",
    "Blackjack-v0": "[Stand]",
    "Countdown-v0": "[0 1 +]",
    "Crosswords-v0": "[6 7 r]",
    "Cryptarithm-v0": "[S 9]",
    "FifteenPuzzle-v0": "[up]",
    "FrozenLake-v0": "[right]",
    "GuessTheNumber-v0": "[1]",
    "LightsOut-v0": "[0 0]",
    "LogicPuzzle-v0": "[gasoline bob X]",
    "Mastermind-v0": "[1 2 3 4]",
    "Minesweeper-v0": "[3 2]",
    "PegJump-v0": "[14 5]",
    "RushHour-v0": "[H-]",
    "Secretary-v0": "[continue]",
    "Set-v0": "[1, 2, 3]",
    "Slitherlink-v0": "[h 0 0]",
    "Sokoban-v0": "[up]",
    "Sudoku-v0-very-easy": "[2 3 9]",
    "ThreeCardMonte-v0": "[0]",
    "TowerOfHanoi-v0": "[A C]",
}
"""The games of one player that need no download, each with a first move that is valid."""

_ONE_TURN = {"ThreeCardMonte-v0"}


def _build_episode(
    name: str,
    game: str,
    *turns: str,
    kinds: tuple[str, ...],
    done: bool = True,
    opponent: tuple[str, ...] = (),
    self_play: bool = False,
) -> Episode:
    return Episode(
        name=name,
        problem={"id": game, "config": "{}", "players": 1 + bool(opponent), "seed": 3},
        turns=turns,
        kinds=kinds,
        done=done,
        options={"opponent": opponent, "order": "listed"} if opponent else {},
        self_play=self_play,
    )


_GUESS = "GuessTheNumber-v0"  # the secret is 8

EPISODES = (
    _build_episode("gold", _GUESS, "[8]", kinds=("move",)),
    _build_episode("hint", _GUESS, "<answer>1</answer>", "8", kinds=("move", "move")),
    _build_episode("hostile", _GUESS, "[" * 10_000, "", kinds=("invalid", "invalid")),
    *(
        _build_episode(game, game, move, kinds=("move",), done=game in _ONE_TURN)
        for game, move in SINGLE_PLAYER.items()
    ),
    # Each player takes the first free cell: the first one has the diagonal 2, 4, 6.
    _build_episode(
        "two players",
        "TicTacToe-v0",
        *("0", "2", "4", "6"),
        kinds=("move",) * 4,
        opponent=tuple(f"[{cell}]" for cell in range(9)),
    ),
    _build_episode(
        "self-play",
        "TicTacToe-v0",
        *("0", "1", "4", "2", "8"),
        kinds=("move",) * 5,
        opponent=tuple(f"[{cell}]" for cell in range(9)),
        self_play=True,
    ),
)
