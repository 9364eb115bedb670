"""Metrics of rollouts with an environment, computed from their trees alone.

The `info` of a turn comes from a plugin and may repeat text of the model. Only short words become
part of a metric name, and only a limited number of them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rlx.rollout import RolloutTree, Segment, is_fault_segment

__all__ = ["MOST_KEYS", "MOST_VALUES", "environment_figures"]

MOST_KEYS, MOST_VALUES = 50, 20
"""Maximum number of `info` keys, first by name, and of values per key, most frequent first."""

_LONGEST_WORD = 40
_LARGEST = 1e18


def environment_figures(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Metrics of the turns, tokens, kinds and `info` of a step's rollouts.

    Args:
        trees: rollouts of one step.

    Returns:
        Empty if no environment wrote or reported anything. Otherwise, under `environment/`:
        `turns` and `turns_max`, mean and maximum number of turns of a rollout; `tokens_per_turn`
        of the policy; `token_share`, the environment's share of the response tokens; `finished`,
        the share of rollouts with nothing after their last turn; `faults`, how often the
        environment failed; `turn/KIND`, the share of turns of each kind; `info/KEY`, the mean of a
        boolean or number over the turns that have it; and `info/KEY/VALUE`, the share of each word
        among the turns whose KEY is a text.
    """
    driven = any(s.author == "environment" or s.info for t in trees for s in t.segments)
    rollouts = [[t.segments[i] for i in t.path(last)] for t in trees for last in t.rollouts]
    if not driven or not rollouts:
        return {}
    lengths = [sum(s.author == "policy" for s in path) for path in rollouts]
    turns = [s for path in rollouts for s in path if s.author == "policy"]
    policy_tokens = sum(len(s.token_ids) for s in turns)
    environment_tokens = sum(
        len(s.token_ids) for path in rollouts for s in path if s.author == "environment"
    )
    figures = {
        "turns": float(np.mean(lengths)),
        "turns_max": float(max(lengths)),
        "tokens_per_turn": policy_tokens / len(turns),
        "token_share": environment_tokens / (environment_tokens + policy_tokens),
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
    """Whether each rollout finished: one that is cut off has an observation after its last turn."""
    continued = {segment.parent for segment in tree.segments}
    return [last not in continued for last in tree.rollouts]


def _compute_info_figures(turns: Sequence[Segment]) -> dict[str, float]:
    """Means of numbers and shares of words in `info`, over the turns that have them."""
    info: dict[str, list[object]] = {}
    for turn in turns:
        for key, value in turn.info.items():
            info.setdefault(_sanitize_metric_name(key), []).append(value)
    figures: dict[str, float] = {}
    for key in sorted(info)[:MOST_KEYS]:
        numbers = [float(v) for v in info[key] if isinstance(v, int | float) and _is_small(v)]
        if numbers:
            figures[key] = float(np.mean(numbers))
        shares = _compute_word_shares([v for v in info[key] if isinstance(v, str)])
        figures |= {f"{key}/{word}": share for word, share in shares.items()}
    return figures


def _is_small(value: float) -> bool:
    """Whether a value is finite and small enough to sum; JSON integers are unbounded."""
    return abs(value) <= _LARGEST


def _compute_word_shares(texts: Sequence[str]) -> Mapping[str, float]:
    """The shares of the most frequent words; longer texts count in the total but are not named."""
    words = Counter(_sanitize_metric_name(text) for text in texts if len(text) <= _LONGEST_WORD)
    commonest = sorted(words, key=lambda word: (-words[word], word))[:MOST_VALUES]
    return {word: words[word] / len(texts) for word in commonest}


def _sanitize_metric_name(text: str) -> str:
    """A text as part of a metric name, in characters that every tracker accepts."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text[:_LONGEST_WORD]) or "_"
