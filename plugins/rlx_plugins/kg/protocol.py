"""Parses the agent's turns, in the protocol of KG-R1 (arXiv 2509.26383), in linear time."""

from typing import Literal, NamedTuple

from rlx.plugin import get_last_block

Kind = Literal["kg_query", "answer", "invalid"]

FUNCTIONS = {
    "get_tail_relations": 1,
    "get_head_relations": 1,
    "get_tail_entities": 2,
    "get_head_entities": 2,
}
"""The graph's functions and their numbers of arguments: an entity, then a relation."""

_ALIASES = {
    "get_relations_out": "get_tail_relations",
    "get_relations_in": "get_head_relations",
    "get_entities_out": "get_tail_entities",
    "get_entities_in": "get_head_entities",
} | {name: name for name in FUNCTIONS}

_MAX_QUERY_CHARACTERS = 2000
_MARKS = tuple(f"<{end}{tag}>" for tag in ("think", "kg-query", "answer") for end in ("", "/"))


class KgTurn(NamedTuple):
    """A turn's kind of action, and the content of its tag ("" for an invalid turn)."""

    kind: Kind
    content: str


class KgQuery(NamedTuple):
    function: str
    arguments: tuple[str, ...]


def read_turn(text: str) -> KgTurn:
    """Finds the action of a turn: the last answer, or else the last query."""
    answer = get_last_block(text, "<answer>", "</answer>")
    if answer is not None:
        return KgTurn("answer", answer)
    query = get_last_block(text, "<kg-query>", "</kg-query>")
    return KgTurn("invalid", "") if query is None else KgTurn("kg_query", query)


def read_query(text: str) -> KgQuery | None:
    """Parses `function( argument, ...)`; None if malformed. An argument that contains a comma or
    begins with a quotation mark must be quoted."""
    name, _, rest = text.strip().partition("(")
    function = _ALIASES.get(name.strip())
    if function is None or len(text) > _MAX_QUERY_CHARACTERS or not rest.endswith(")"):
        return None
    arguments = _parse_query_arguments(rest[:-1])
    return KgQuery(function, arguments) if len(arguments) == FUNCTIONS[function] else None


def _parse_query_arguments(text: str) -> tuple[str, ...]:
    """The arguments between the parentheses; none if one is empty or a quote is not closed."""
    found = []
    comma = ","
    while comma:
        text = text.strip()
        if text.startswith(('"', "'")):
            argument, closed, text = text[1:].partition(text[0])
            between, comma, text = text.partition(",")
            if not closed or between.strip():
                return ()
        else:
            argument, comma, text = text.partition(",")
        if not argument.strip():
            return ()
        found.append(argument.strip())
    return tuple(found)


def is_well_formed(text: str) -> bool:
    """Whether a whole turn is `<think>...</think>`, then one action, each tag exactly once."""
    text = text.strip()
    tags = [tag for tag in ("kg-query", "answer") if text.endswith(f"</{tag}>")]
    counts = {mark: text.count(mark) for mark in _MARKS}
    wanted = {mark: 1 for tag in ("think", *tags) for mark in (f"<{tag}>", f"</{tag}>")}
    if not tags or counts != dict.fromkeys(_MARKS, 0) | wanted:
        return False
    thought, _, action = text.partition("</think>")
    return thought.startswith("<think>") and action.lstrip().startswith(f"<{tags[0]}>")
