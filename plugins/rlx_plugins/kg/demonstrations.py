"""The scripted policy for warm starts: good episodes, and episodes with one known mistake each."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlx_plugins.kg.questions import Type
from rlx_plugins.kg.text import escape_text

Mode = Literal[
    "good",
    "wrong_relation",
    "wrong_direction",
    "short",
    "short2",
    "guess",
    "invalid",
    "duplicate",
]
"""Modes of an episode, in order: correct; queries the next relation by name; queries in the wrong
direction; answers after one query; after two; without any; malforms its first query; repeats its
first query. The last two continue correctly."""

_Weights = Mapping[Mode, float]

_SLIPS: _Weights = {"guess": 0.06, "invalid": 0.05, "duplicate": 0.05}
MIX: Mapping[Type, _Weights] = {
    "forward": {"good": 0.32, "wrong_relation": 0.45, **_SLIPS, "guess": 0.13},
    "inverse": {"good": 0.30, "wrong_direction": 0.50, **_SLIPS, "guess": 0.10},
    "hop2": {"good": 0.26, "short": 0.58, **_SLIPS},
    "neighbour": {"good": 0.26, "short": 0.58, **_SLIPS},
    "hop3": {"good": 0.26, "short": 0.54, "short2": 0.10, "guess": 0.10},  # no turn to spare
    "intersection": {"good": 0.26, "short": 0.58, **_SLIPS},
    "count": {"good": 0.30, "wrong_direction": 0.50, "guess": 0.20},
}
"""Weights of the modes for each type of question."""

_QUERIES: Mapping[str, int] = {"short": 1, "short2": 2, "guess": 0}
"""Number of queries of the modes that answer too early."""


def next_turn(
    fields: Mapping[str, Any],
    mode: str,
    observations: Sequence[str],
    rng: random.Random,
    *,
    relations: Sequence[str],
    guess: Callable[[random.Random], str],
) -> str:
    """Returns the next turn of an episode, based on the observations so far.

    `guess` samples an answer that no observation has shown; `relations` are sorted by name.
    """
    slips = mode in ("invalid", "duplicate")
    hop = len(observations) - (slips and bool(observations))
    if hop >= _QUERIES.get(mode, len(fields["chain"])):
        answer = escape_text(_select_demonstration_answer(fields, observations, rng, guess), None)
        return f"<think> answer found</think><answer> {answer}</answer>"
    direction, relation = fields["chain"][hop]
    if hop == 0 or fields["type"] == "intersection":
        entity = fields["start"][hop]
    else:
        entity = rng.choice(_parse_listed_names(observations[-1]) or (guess(rng),))
    if mode == "wrong_relation":
        relation = relations[(relations.index(relation) + 1) % len(relations)]
    head = (direction == "head") != (mode == "wrong_direction")
    return _format_query_turn(head, entity, relation, whole=mode != "invalid" or bool(observations))


def _format_query_turn(head: bool, entity: str, relation: str, *, whole: bool) -> str:
    entity, relation = escape_text(entity), escape_text(relation)
    thought = f"what has {relation} {entity}" if head else f"{relation} of {entity}"
    function = "get_head_entities" if head else "get_tail_entities"
    arguments = ", ".join(
        f'"{name}"' if "," in name or name.startswith(('"', "'")) else name
        for name in ((entity, relation) if whole else (entity,))
    )
    return f"<think> find {thought}</think><kg-query>{function}( {arguments})</kg-query>"


def _select_demonstration_answer(
    fields: Mapping[str, Any],
    observations: Sequence[str],
    rng: random.Random,
    guess: Callable[[random.Random], str],
) -> str:
    found = _parse_listed_names(observations[-1]) if observations else []
    if not found:
        return guess(rng)
    if fields["type"] == "count":
        last = _split_observation_names(observations[-1])[-1]
        return str(len(found) + _parse_more_count(last))
    if fields["type"] == "intersection" and len(observations) > 1:
        found = [n for n in found if n in _parse_listed_names(observations[-2])] or found
    return rng.choice(found) if fields["any_of"] else ", ".join(found)


def _parse_listed_names(observation: str) -> list[str]:
    """The names listed in an observation; none if it reports an error."""
    names = _split_observation_names(observation)
    return names[:-1] if names and _parse_more_count(names[-1]) else names


def _split_observation_names(observation: str) -> list[str]:
    text = observation.partition("<information>")[2].partition("</information>")[0]
    heading, _, names = text.strip().partition(": ")
    return names.split(", ") if names and not heading.startswith("error ") else []


def _parse_more_count(name: str) -> int:
    """How many results `+12 more` stands for; 0 for any other text."""
    count = name.removeprefix("+").removesuffix(" more")
    return int(count) if name == f"+{count} more" and count.isdecimal() else 0
