"""Views of a graph for one episode: with permuted names, or without held-out facts."""

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from rlx_plugins.kg.graph import Graph, Triple, select_held_out_facts


class GraphView:
    """A view of a graph for one episode: with permuted names, or without held-out facts.

    It has the methods of a `Graph` and takes a microsecond to create. World 0 has the real names.
    In every other world, the entities of each kind exchange their labels, ids and aliases by a
    permutation drawn from the world's number, while the facts stay the same. An entity's number
    is the same in all worlds.

    Attributes:
        graph: the whole graph, in world 0.
        world: number of the world, from 0.
        hide: share of hidden facts, in [0, 1); see `select_held_out_facts`.
    """

    __slots__ = ("_hidden", "_renaming", "entities", "graph", "hide", "relations", "world")

    def __init__(self, graph: Graph, *, world: int = 0, hide: float = 0.0) -> None:
        if world < 0:
            raise ValueError(f"worlds are numbered from 0, got {world}")
        self.graph, self.world, self.hide = graph, world, hide
        self.entities, self.relations = graph.entities, graph.relations
        self._renaming = _sample_renaming(graph, world) if world else None
        self._hidden = select_held_out_facts(graph, hide) if hide else frozenset()

    def entity(self, name: str) -> int | None:
        """Returns the entity with this label, id or alias in this world, or None."""
        named = self.graph.entity(name)
        if named is None or self._renaming is None:
            return named
        return self._renaming.bearer[named]

    def relation(self, name: str) -> int | None:
        """As of the graph."""
        return self.graph.relation(name)

    def id(self, entity: int) -> str:
        """Returns the entity's id in this world."""
        return self.graph.id(self._get_renamed_entity(entity))

    def label(self, entity: int) -> str:
        """Returns the entity's label in this world, not escaped."""
        return self.graph.label(self._get_renamed_entity(entity))

    def kind(self, entity: int) -> str:
        """As of the graph."""
        return self.graph.kind(entity)

    def aliases(self, entity: int) -> tuple[str, ...]:
        """Returns the entity's aliases in this world, sorted, not escaped."""
        return self.graph.aliases(self._get_renamed_entity(entity))

    def relation_name(self, relation: int) -> str:
        """As of the graph."""
        return self.graph.relation_name(relation)

    def relation_id(self, relation: int) -> str:
        """As of the graph."""
        return self.graph.relation_id(relation)

    def tails(self, entity: int, relation: int) -> Sequence[int]:
        """As of the graph, in order of the labels of this world."""
        found = self.graph.tails(entity, relation)
        if self._hidden:
            found = [o for o in found if (entity, relation, o) not in self._hidden]
        return self._sort_entities(found)

    def heads(self, entity: int, relation: int) -> Sequence[int]:
        """As of the graph, in order of the labels of this world."""
        found = self.graph.heads(entity, relation)
        if self._hidden:
            found = [s for s in found if (s, relation, entity) not in self._hidden]
        return self._sort_entities(found)

    def tail_relations(self, entity: int) -> Sequence[int]:
        """As of the graph, without relations all of whose facts are hidden."""
        found = self.graph.tail_relations(entity)
        if not self._hidden:
            return found
        return [
            r
            for r in found
            if self._has_visible_fact((entity, r, o) for o in self.graph.tails(entity, r))
        ]

    def head_relations(self, entity: int) -> Sequence[int]:
        """As of the graph, without relations all of whose facts are hidden."""
        found = self.graph.head_relations(entity)
        if not self._hidden:
            return found
        return [
            r
            for r in found
            if self._has_visible_fact((s, r, entity) for s in self.graph.heads(entity, r))
        ]

    def triples(self) -> Iterator[Triple]:
        """Yields all facts that are not hidden, in the order of the graph."""
        return (triple for triple in self.graph.triples() if triple not in self._hidden)

    def __len__(self) -> int:
        return len(self.graph) - len(self._hidden)

    def _get_renamed_entity(self, entity: int) -> int:
        return entity if self._renaming is None else self._renaming.name[entity]

    def _sort_entities(self, entities: Sequence[int]) -> Sequence[int]:
        if self._renaming is None or len(entities) < 2:
            return entities
        return sorted(entities, key=self._renaming.name.__getitem__)

    def _has_visible_fact(self, triples: Iterable[Triple]) -> bool:
        return any(triple not in self._hidden for triple in triples)


class _Renaming(NamedTuple):
    """The entity whose name each entity has in a world, and the inverse permutation."""

    name: tuple[int, ...]
    bearer: tuple[int, ...]


@lru_cache(maxsize=64)
def _sample_renaming(graph: Graph, world: int) -> _Renaming:
    """A permutation within each kind, drawn from the world's number."""
    members: dict[str, list[int]] = {}
    for entity in graph.entities:
        members.setdefault(graph.kind(entity), []).append(entity)
    name, bearer = list(graph.entities), list(graph.entities)
    for kind, own in members.items():
        shuffled = random.Random(f"world {world}/{kind}").sample(own, len(own))
        for entity, other in zip(own, shuffled, strict=True):
            name[entity] = other
            bearer[other] = entity
    return _Renaming(tuple(name), tuple(bearer))
