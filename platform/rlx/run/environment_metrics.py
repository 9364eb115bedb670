"""Figures of rollouts that an environment took part in, made from their trees alone.

What a turn's info says comes from a plugin and may repeat what the model wrote: it becomes part of
a name only where it is a short word, and only so many of them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rlx.rollout import RolloutTree, Segment, is_fault_segment

__all__ = ["MOST_KEYS", "MOST_VALUES", "environment_figures"]

MOST_KEYS, MOST_VALUES = 50, 20
"""Keys of info that are looked at, first by name; values of one that are told, the commonest."""

_LONGEST_WORD = 40
_LARGEST = 1e18


def environment_figures(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Turns, tokens, kinds and info of a step's rollouts.

    Args:
        trees: of one step.

    Returns:
        Nothing where no environment wrote or reported anything. Otherwise, under `environment/`:
        `turns` and `turns_max` of a rollout; policy `tokens_per_turn`; `token_share` of the
        environment among the tokens of the responses; `finished`, the share of rollouts that were
        done, so that nothing came after their last turn; `faults`, how often the environment
        failed; `turn/KIND`, the share of turns of each kind; `info/KEY`, the mean of a boolean or
        number over the turns that have it; and `info/KEY/VALUE`, the share of each word among the
        turns whose KEY is a text.
    """
    driven = any(s.author == "environment" or s.info for t in trees for s in t.segments)
    rollouts = [[t.segments[i] for i in t.path(last)] for t in trees for last in t.rollouts]
    if not driven or not rollouts:
        return {}
    lengths = [sum(s.author == "policy" for s in path) for path in rollouts]
    turns = [s for path in rollouts for s in path if s.author == "policy"]
    written = sum(len(s.token_ids) for s in turns)
    shown = sum(len(s.token_ids) for path in rollouts for s in path if s.author == "environment")
    figures = {
        "turns": float(np.mean(lengths)),
        "turns_max": float(max(lengths)),
        "tokens_per_turn": written / len(turns),
        "token_share": shown / (shown + written),
        "finished": float(
            np.mean([done for tree in trees for done in _flag_finished_rollouts(tree)])
        ),
        "faults": float(sum(is_fault_segment(s) for t in trees for s in t.segments)),
        **{
            f"turn/{kind}": share
            for kind, share in _compute_word_shares([s.kind for s in turns]).items()
        },
        **{f"info/{name}": value for name, value in _compute_info_figures(turns).items()},
    }
    return {f"environment/{name}": value for name, value in figures.items()}


def _flag_finished_rollouts(tree: RolloutTree) -> list[bool]:
    """For each rollout whether it was done: a rollout cut off ends with what it would have seen."""
    continued = {segment.parent for segment in tree.segments}
    return [last not in continued for last in tree.rollouts]


def _compute_info_figures(turns: Sequence[Segment]) -> dict[str, float]:
    """Means of numbers and shares of words, over the turns that have them."""
    said: dict[str, list[object]] = {}
    for turn in turns:
        for key, value in turn.info.items():
            said.setdefault(_sanitize_metric_name(key), []).append(value)
    figures: dict[str, float] = {}
    for key in sorted(said)[:MOST_KEYS]:
        numbers = [float(v) for v in said[key] if isinstance(v, int | float) and _is_small(v)]
        if numbers:
            figures[key] = float(np.mean(numbers))
        shares = _compute_word_shares([v for v in said[key] if isinstance(v, str)])
        figures |= {f"{key}/{word}": share for word, share in shares.items()}
    return figures


def _is_small(value: float) -> bool:
    """Finite, and small enough that sums stay so; integers of JSON have no largest."""
    return abs(value) <= _LARGEST


def _compute_word_shares(texts: Sequence[str]) -> Mapping[str, float]:
    """The share of each of the commonest words; longer texts are counted and not named."""
    words = Counter(_sanitize_metric_name(text) for text in texts if len(text) <= _LONGEST_WORD)
    commonest = sorted(words, key=lambda word: (-words[word], word))[:MOST_VALUES]
    return {word: words[word] / len(texts) for word in commonest}


def _sanitize_metric_name(text: str) -> str:
    """A part of a metric's name, in letters that every tracker takes."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text[:_LONGEST_WORD]) or "_"
