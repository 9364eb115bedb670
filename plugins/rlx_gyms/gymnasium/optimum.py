"""Optimal values of tabular environments by backward induction (Sutton & Barto 2018, section 4.4).

An environment with `P[state][action] = [(probability, next state, reward, terminated), ...]` has
them exactly.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from rlx_gyms.gymnasium.games import open_game

__all__ = ["compute_action_values", "get_action_values"]

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
    """The values of an environment by name; None if it is not tabular."""
    table = getattr(open_game(id, config), "P", None)
    return None if table is None else compute_action_values(table, turns)
