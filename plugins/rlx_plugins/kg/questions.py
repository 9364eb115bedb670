"""Generates questions over a graph from templates, with all right answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal

from rlx.plugin import Split
from rlx_plugins.kg.graph import Graph, Triple, find_symmetric_relations, select_held_out_facts
from rlx_plugins.kg.text import escape_text

Type = Literal["forward", "inverse", "hop2", "hop3", "neighbour", "intersection", "count"]
Direction = Literal["tail", "head", "both"]
Hop = tuple[Direction, int]
"""A relation that is followed to its objects (tail), to its subjects (head), or both ways, if it is
symmetric: it then reads as a verb, as in a country that borders France."""

_Path = tuple[Triple, ...]
_Grammar = Mapping[Direction, frozenset[int]]

TYPES: Mapping[Type, tuple[tuple[Direction, ...], ...]] = {
    "forward": (("tail",), ("both",)),
    "inverse": (("head",),),
    "hop2": (("head", "tail"), ("tail", "tail")),
    "hop3": (("head", "both", "tail"), ("head", "tail", "tail"), ("tail", "tail", "tail")),
    "neighbour": (("both", "tail"),),
    "intersection": (("both",), ("head",)),  # from each of two entities
    "count": (("both",), ("head",)),
}
"""The chains of directions of each type of question."""

_WIDEST = 100
"""Maximum number of paths of a question; chains with more are left out."""


@dataclass(frozen=True, slots=True)
class KgQuestion:
    """A question in terms of entity and relation numbers; its wording depends on the world."""

    type: Type
    starts: tuple[int, ...]
    """The start entity; two for `intersection`."""
    chain: tuple[Hop, ...]
    """The hops from it; for `intersection` one from each start."""
    kinds: tuple[str, ...]
    """The kind of the entity after each hop."""
    answers: tuple[int, ...]
    """All right entities, in order of label; for `count` the counted ones."""


# Which questions there are, and in which split ----------------------------------------------------


@lru_cache(maxsize=8)
def build_question_population(
    graph: Graph, share: float
) -> Mapping[Split, Mapping[Type, tuple[KgQuestion, ...]]]:
    """Returns the questions of each split and type, in a fixed order.

    A question is for training if no path to a right answer uses a held-out fact, and for testing if
    every path does; others are left out. A count has one path with all counted facts.
    """
    held = select_held_out_facts(graph, share)
    found: dict[Split, dict[Type, tuple[KgQuestion, ...]]] = {"train": {}, "test": {}}
    for type_ in TYPES:
        split: dict[Split, list[KgQuestion]] = {"train": [], "test": []}
        for question, paths in _generate_questions(graph, type_):
            touched = [not held.isdisjoint(path) for path in paths]
            if len(set(touched)) == 1:
                split["test" if touched[0] else "train"].append(question)
        for name, questions in split.items():
            found[name][type_] = tuple(questions)
    return found


def _generate_questions(graph: Graph, type_: Type) -> Iterator[tuple[KgQuestion, Sequence[_Path]]]:
    both = find_symmetric_relations(graph)
    one_way = frozenset(graph.relations) - both
    grammar: _Grammar = {"tail": one_way, "head": one_way, "both": both}
    if type_ == "intersection":
        yield from _generate_intersection_questions(graph, grammar)
        return
    for start in graph.entities:
        for directions in TYPES[type_]:
            for chain, paths in _find_hop_chains(graph, start, directions, grammar):
                hops = zip(chain, paths[0], strict=True)
                kinds = tuple(graph.kind(_get_hop_end(hop, triple)) for hop, triple in hops)
                answers = sorted({_get_hop_end(chain[-1], path[-1]) for path in paths})
                if start not in answers:
                    whole = tuple(triple for path in paths for triple in path)
                    question = KgQuestion(type_, (start,), chain, kinds, tuple(answers))
                    yield question, [whole] if type_ == "count" else paths


def _find_hop_chains(
    graph: Graph, start: int, directions: Sequence[Direction], grammar: _Grammar
) -> Iterator[tuple[tuple[Hop, ...], list[_Path]]]:
    """The chains from an entity, each with its paths. What a question calls "the" something must be
    unique, and no hop goes straight back."""
    walks: list[tuple[tuple[Hop, ...], list[_Path]]] = [((), [()])]
    for depth, direction in enumerate(directions):
        longer = []
        for chain, paths in walks:
            ends = {_get_hop_end(chain[-1], path[-1]) for path in paths} if chain else {start}
            if len(ends) > 1 and directions[depth - 1] != "both":
                continue
            relations = graph.head_relations if direction == "head" else graph.tail_relations
            known = {relation for entity in ends for relation in relations(entity)}
            for relation in sorted(known & grammar[direction]):
                if chain == (("head", relation),) and direction == "tail":
                    continue
                hop = (direction, relation)
                further = [
                    (*path, triple)
                    for path in paths
                    for triple in _list_hop_triples(
                        graph, _get_hop_end(chain[-1], path[-1]) if path else start, hop
                    )
                ]
                if len(further) <= _WIDEST:
                    longer.append(((*chain, hop), further))
        walks = longer
    return iter(walks)


def _get_hop_end(hop: Hop, triple: Triple) -> int:
    return triple[0] if hop[0] == "head" else triple[2]


def _list_hop_triples(graph: Graph, entity: int, hop: Hop) -> list[Triple]:
    direction, relation = hop
    if direction == "head":
        return [(subject, relation, entity) for subject in graph.heads(entity, relation)]
    return [(entity, relation, object_) for object_ in graph.tails(entity, relation)]


def _generate_intersection_questions(
    graph: Graph, grammar: _Grammar
) -> Iterator[tuple[KgQuestion, Sequence[_Path]]]:
    """Questions for the common results of two hops, neither of which suffices alone."""
    seen = set()
    for entity in graph.entities:
        back: list[tuple[Hop, int]] = [
            (("both" if relation in grammar["both"] else "head", relation), start)
            for relation in graph.tail_relations(entity)
            for start in graph.tails(entity, relation)
        ]
        if len(back) > _WIDEST:
            continue
        for pair in combinations(sorted(back), 2):
            if pair in seen:
                continue
            seen.add(pair)
            (first, one), (second, other) = pair
            reached = [
                {_get_hop_end(h, t): t for t in _list_hop_triples(graph, s, h)} for h, s in pair
            ]
            answers = tuple(sorted(reached[0].keys() & reached[1].keys()))
            if len(answers) < min(map(len, reached)) and max(map(len, reached)) <= _WIDEST:
                kinds = (graph.kind(entity), graph.kind(entity))
                paths = [tuple(facts[answer] for facts in reached) for answer in answers]
                yield (
                    KgQuestion("intersection", (one, other), (first, second), kinds, answers),
                    paths,
                )


# Wordings ----------------------------------------------------------------------------------------

_ONE: Mapping[Direction, tuple[str, ...]] = {
    "tail": (
        "what is the {relation} of {entity} ?",
        "name the {relation} of {entity} ?",
        "tell me the {relation} of {entity} ?",
    ),
    "head": (
        "which {kind} has {relation} {entity} ?",
        "name a {kind} whose {relation} is {entity} ?",
    ),
    "both": ("which {kind} {relation} {entity} ?", "name a {kind} that {relation} {entity} ?"),
}
_EVERY: Mapping[Direction, tuple[str, ...]] = {
    "tail": ("list every {relation} of {entity} ?",),
    "head": ("list every {kind} whose {relation} is {entity} ?",),
    "both": ("list every {kind} that {relation} {entity} ?",),
}
_COUNT: Mapping[Direction, tuple[str, ...]] = {
    direction: tuple(template.replace("list", "count") for template in templates)
    for direction, templates in _EVERY.items()
}
_SHARED = ("which {kind} {first} and {second} ?", "name a {kind} that {first} and {second} ?")
_EVERY_SHARED = ("list every {kind} that {first} and {second} ?",)
_CONDITION: Mapping[Direction, str] = {
    "head": "has {relation} {entity}",
    "both": "{relation} {entity}",
}
_NOUN: Mapping[Direction, str] = {
    "tail": "the {relation} of {entity}",
    "head": "the {kind} whose {relation} is {entity}",
    "both": "a {kind} that {relation} {entity}",
}


def list_question_templates(question: KgQuestion, every: bool) -> tuple[str, ...]:
    if question.type == "intersection":
        return _EVERY_SHARED if every else _SHARED
    direction, _ = question.chain[-1]
    if question.type == "count":
        return _COUNT[direction]
    return (_EVERY if every else _ONE)[direction]


def format_question(view: Graph, question: KgQuestion, template: str) -> str:
    kind = question.kinds[-1]
    names = [escape_text(view.label(entity)) for entity in question.starts]
    verbs = [escape_text(view.relation_name(relation)) for _, relation in question.chain]
    if question.type == "intersection":
        conditions = [
            _CONDITION[direction].format(relation=verb, entity=name)
            for (direction, _), verb, name in zip(question.chain, verbs, names, strict=True)
        ]
        return template.format(kind=kind, first=conditions[0], second=conditions[1])
    (noun,) = names
    *inner, last = verbs
    for (direction, _), verb, middle in zip(question.chain, inner, question.kinds, strict=False):
        noun = _NOUN[direction].format(relation=verb, entity=noun, kind=middle)
    return template.format(relation=last, entity=noun, kind=kind)
