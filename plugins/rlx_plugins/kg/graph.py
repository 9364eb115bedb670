"""An in-memory knowledge graph, numbered in order of names, and the one that rlx ships."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib.resources import files
from types import MappingProxyType

from rlx_plugins.kg.text import escape_text

Triple = tuple[int, int, int]
"""Subject, relation and object, by number."""

_NAMES: Mapping[str, str] = MappingProxyType({})
_ALIASES: Mapping[str, Sequence[str]] = MappingProxyType({})


class Graph:
    """A knowledge graph of facts, each with a subject, a relation and an object.

    The same facts in any order give the same graph, including numbers. Lookup by name ignores case
    and white space, and accepts names as `escape_text` shows them: an entity by label, id or alias,
    a relation by label or id. If several entities share a name, a label takes precedence over an
    id, an id over an alias, and then the first entity. Labels and aliases are not escaped.

    Args:
        triples: facts by ids; duplicates are ignored.
        labels: labels of entities and relations; the id by default.
        aliases: other names of entities.
        kinds: kinds of entities, such as `country`; "" by default.
    """

    def __init__(
        self,
        triples: Iterable[tuple[str, str, str]],
        *,
        labels: Mapping[str, str] = _NAMES,
        aliases: Mapping[str, Sequence[str]] = _ALIASES,
        kinds: Mapping[str, str] = _NAMES,
    ) -> None:
        facts = set(triples)
        verbs = {relation for _, relation, _ in facts}
        things = {id_ for subject, _, object_ in facts for id_ in (subject, object_)}
        things |= {*labels, *aliases, *kinds} - verbs
        self._entities = _Names(things, labels, aliases, kinds)
        self._relations = _Names(verbs, labels, _ALIASES, _NAMES)
        self.entities, self.relations = range(len(things)), range(len(verbs))
        thing = {id_: number for number, id_ in enumerate(self._entities.ids)}
        verb = {id_: number for number, id_ in enumerate(self._relations.ids)}
        self._triples = sorted((thing[s], verb[p], thing[o]) for s, p, o in facts)
        self._spo = _index_triples(self._triples)
        self._pos = _index_triples((p, o, s) for s, p, o in self._triples)
        self._ops = _index_triples((o, p, s) for s, p, o in self._triples)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the graph's content in hexadecimal, independent of the order of the input."""
        state = hashlib.sha256()
        for names in (self._entities, self._relations):
            rows = zip(names.ids, names.labels, names.kinds, strict=True)
            for number, row in enumerate(rows):
                state.update(json.dumps([*row, *names.aliases.get(number, ())]).encode() + b"\n")
            state.update(b"\n")
        things, verbs = len(self.entities), len(self.relations)
        keys = ((s * verbs + p) * things + o for s, p, o in self._triples)
        state.update(" ".join(map(str, keys)).encode())
        return state.hexdigest()

    def entity(self, name: str) -> int | None:
        return self._entities.numbers.get(_fold_name(name))

    def relation(self, name: str) -> int | None:
        return self._relations.numbers.get(_fold_name(name))

    def id(self, entity: int) -> str:
        return self._entities.ids[entity]

    def label(self, entity: int) -> str:
        return self._entities.labels[entity]

    def kind(self, entity: int) -> str:
        return self._entities.kinds[entity]

    def aliases(self, entity: int) -> tuple[str, ...]:
        return self._entities.aliases.get(entity, ())

    def relation_id(self, relation: int) -> str:
        return self._relations.ids[relation]

    def relation_name(self, relation: int) -> str:
        return self._relations.labels[relation]

    def tails(self, entity: int, relation: int) -> Sequence[int]:
        """The objects of facts with this subject and relation, in order of label."""
        return self._spo.get(entity, {}).get(relation, [])

    def heads(self, entity: int, relation: int) -> Sequence[int]:
        return self._pos.get(relation, {}).get(entity, [])

    def tail_relations(self, entity: int) -> Sequence[int]:
        return list(self._spo.get(entity, ()))

    def head_relations(self, entity: int) -> Sequence[int]:
        return list(self._ops.get(entity, ()))

    def triples(self) -> Iterator[Triple]:
        return iter(self._triples)


@lru_cache(maxsize=8)
def select_held_out_facts(graph: Graph, share: float) -> frozenset[Triple]:
    """Returns the facts held out for testing: a share of the pairs of a subject and a relation, by
    a hash of their ids. Facts of a symmetric relation are held out in both directions together."""
    both_ways = find_symmetric_relations(graph)

    def is_test_fact(subject: int, relation: int, object_: int) -> bool:
        pair = (subject, object_) if relation in both_ways else (subject,)
        ids = sorted(graph.id(entity) for entity in pair)
        text = "\0".join(["held out", graph.relation_id(relation), *ids])
        drawn = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(drawn, "big") < share * (1 << 64)

    return frozenset(triple for triple in graph.triples() if is_test_fact(*triple))


@lru_cache(maxsize=8)
def find_symmetric_relations(graph: Graph) -> frozenset[int]:
    """Returns the relations for which every fact has its inverse."""
    one_way: set[int] = set()
    for subject, relation, object_ in graph.triples():
        if relation not in one_way and subject not in graph.tails(object_, relation):
            one_way.add(relation)
    return frozenset(graph.relations) - one_way


class GraphView(Graph):
    """A graph for one episode: with permuted names, or without a share of the facts.

    World 0 has the real names. In every other world, the entities of each kind exchange their
    labels, ids and aliases by a permutation drawn from the world's number, while the facts stay the
    same. An entity's number is the same in all worlds.
    """

    def __init__(self, graph: Graph, *, world: int = 0, hide: float = 0.0) -> None:
        vars(self).update(vars(graph))
        self._names, self._bearers = _sample_renaming(graph, world)
        self._hidden = select_held_out_facts(graph, hide) if hide else frozenset[Triple]()

    def entity(self, name: str) -> int | None:
        named = super().entity(name)
        return None if named is None else self._bearers[named]

    def id(self, entity: int) -> str:
        return super().id(self._names[entity])

    def label(self, entity: int) -> str:
        return super().label(self._names[entity])

    def aliases(self, entity: int) -> tuple[str, ...]:
        return super().aliases(self._names[entity])

    def tails(self, entity: int, relation: int) -> Sequence[int]:
        found = super().tails(entity, relation)
        shown = (o for o in found if (entity, relation, o) not in self._hidden)
        return sorted(shown, key=self._names.__getitem__)

    def heads(self, entity: int, relation: int) -> Sequence[int]:
        found = super().heads(entity, relation)
        shown = (s for s in found if (s, relation, entity) not in self._hidden)
        return sorted(shown, key=self._names.__getitem__)

    def tail_relations(self, entity: int) -> Sequence[int]:
        return [r for r in super().tail_relations(entity) if self.tails(entity, r)]

    def head_relations(self, entity: int) -> Sequence[int]:
        return [r for r in super().head_relations(entity) if self.heads(entity, r)]


@lru_cache(maxsize=64)
def _sample_renaming(graph: Graph, world: int) -> tuple[Sequence[int], Sequence[int]]:
    """The entity whose name each entity has in a world, and the inverse permutation."""
    if world == 0:
        return graph.entities, graph.entities
    members: dict[str, list[int]] = {}
    for entity in graph.entities:
        members.setdefault(graph.kind(entity), []).append(entity)
    names, bearers = list(graph.entities), list(graph.entities)
    for kind, own in members.items():
        shuffled = random.Random(f"world {world}/{kind}").sample(own, len(own))
        for entity, other in zip(own, shuffled, strict=True):
            names[entity] = other
            bearers[other] = entity
    return names, bearers


@lru_cache(maxsize=1)
def load_world_graph() -> Graph:
    """Returns the graph shipped with rlx: countries, capitals, borders, currencies and so on."""
    facts: list[tuple[str, str, str]] = []
    labels: dict[str, str] = {}
    kinds: dict[str, str] = {}
    aliases: dict[str, list[str]] = {}
    table = (files("rlx_plugins.kg") / "data" / "world.tsv").read_text("utf-8")
    for line in table.splitlines():
        if line.startswith("#"):
            continue
        subject, relation, object_ = line.split("\t")
        if relation == "rlx:alias":
            aliases.setdefault(subject, []).append(object_)
        elif relation == "rlx:label":
            labels[subject] = object_
        elif relation == "rlx:kind":
            kinds[subject] = object_
        else:
            facts.append((subject, relation, object_))
    return Graph(facts, labels=labels, kinds=kinds, aliases=aliases)


# What a graph is made of -------------------------------------------------------------------------


def _index_triples(triples: Iterable[Triple]) -> dict[int, dict[int, list[int]]]:
    """The c of triples (a, b, c), by a and b, all in ascending order."""
    found: dict[int, dict[int, list[int]]] = {}
    for a, b, c in sorted(triples):
        found.setdefault(a, {}).setdefault(b, []).append(c)
    return found


class _Names:
    def __init__(
        self,
        ids: Iterable[str],
        labels: Mapping[str, str],
        aliases: Mapping[str, Sequence[str]],
        kinds: Mapping[str, str],
    ) -> None:
        def get_label_order(id_: str) -> tuple[str, str, str]:
            label = labels.get(id_, id_)
            return label.casefold(), label, id_

        self.ids = sorted(ids, key=get_label_order)
        self.labels = [labels.get(id_, id_) for id_ in self.ids]
        self.kinds = [kinds.get(id_, "") for id_ in self.ids]
        self.aliases = {
            number: tuple(sorted(set(aliases[id_])))
            for number, id_ in enumerate(self.ids)
            if aliases.get(id_)
        }
        others = ((number, name) for number, names in self.aliases.items() for name in names)
        self.numbers: dict[str, int] = {}
        for number, name in (*enumerate(self.labels), *enumerate(self.ids), *others):
            self.numbers.setdefault(_fold_name(name), number)


def _fold_name(name: str) -> str:
    return escape_text(name).casefold()
