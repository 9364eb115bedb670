"""An in-memory knowledge graph with three sorted indices over numbered entities and relations.

Numbers follow the order of names, so results read from an index are already in display order. A
fact takes 24 bytes: a 64-bit key in each index.
"""

import hashlib
import json
import random
from array import array
from bisect import bisect_left
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
    id, an id over an alias, and then the first entity.

    Attributes:
        entities: entity numbers, in the order of labels, then ids.
        relations: relation numbers, in the same order.
    """

    def __init__(
        self,
        triples: Iterable[tuple[str, str, str]],
        *,
        labels: Mapping[str, str] = _NAMES,
        aliases: Mapping[str, Sequence[str]] = _ALIASES,
        kinds: Mapping[str, str] = _NAMES,
    ) -> None:
        """Builds the graph from facts by ids.

        Args:
            triples: subject, relation, object; duplicates are ignored.
            labels: labels of entities and relations; the id by default.
            aliases: other names of entities.
            kinds: kinds of entities, such as `country`; "" by default.

        Raises:
            ValueError: an id or a name has no visible text, or there are too many for 64-bit keys.
        """
        things: dict[str, int] = {}
        verbs: dict[str, int] = {}
        columns = array("I"), array("I"), array("I")
        for subject, relation, object_ in triples:
            columns[0].append(things.setdefault(subject, len(things)))
            columns[1].append(verbs.setdefault(relation, len(verbs)))
            columns[2].append(things.setdefault(object_, len(things)))
        for named in (labels, aliases, kinds):
            for id_ in named:
                if id_ not in verbs:
                    things.setdefault(id_, len(things))
        self._entities = _Names(things, labels, aliases, kinds)
        self._relations = _Names(verbs, labels, _ALIASES, _NAMES)
        thing, verb = self._entities.get_id_numbers(things), self._relations.get_id_numbers(verbs)
        self.entities, self.relations = range(len(things)), range(len(verbs))
        self._spo = _Index(
            ((thing[s], verb[p], thing[o]) for s, p, o in zip(*columns, strict=True)),
            len(verbs),
            len(things),
        )
        self._pos = _Index(((p, o, s) for s, p, o in self._spo), len(things), len(things))
        # Not OSP: it would take all subjects to list the relations that lead to an entity.
        self._ops = _Index(((o, p, s) for s, p, o in self._spo), len(verbs), len(things))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the graph's content in hexadecimal, independent of the order of the input."""
        state = hashlib.sha256()
        for names in (self._entities, self._relations):
            rows = zip(names.ids, names.labels, names.kinds, strict=True)
            for number, row in enumerate(rows):
                state.update(json.dumps([*row, *names.aliases.get(number, ())]).encode() + b"\n")
            state.update(b"\n")
        state.update(" ".join(map(str, self._spo.keys)).encode())
        return state.hexdigest()

    def entity(self, name: str) -> int | None:
        """Returns the entity with this label, id or alias, or None."""
        return self._entities.numbers.get(_fold_name(name))

    def relation(self, name: str) -> int | None:
        """Returns the relation with this label or id, or None."""
        return self._relations.numbers.get(_fold_name(name))

    def id(self, entity: int) -> str:
        """Returns the entity's id."""
        return self._entities.ids[entity]

    def label(self, entity: int) -> str:
        """Returns the entity's label, not escaped."""
        return self._entities.labels[entity]

    def kind(self, entity: int) -> str:
        """Returns the entity's kind; "" if unknown."""
        return self._entities.kinds[entity]

    def aliases(self, entity: int) -> tuple[str, ...]:
        """Returns the entity's aliases, sorted, not escaped."""
        return self._entities.aliases.get(entity, ())

    def relation_id(self, relation: int) -> str:
        """Returns the relation's id."""
        return self._relations.ids[relation]

    def relation_name(self, relation: int) -> str:
        """Returns the relation's label, not escaped."""
        return self._relations.labels[relation]

    def tails(self, entity: int, relation: int) -> Sequence[int]:
        """Returns the objects of facts with this subject and relation, in order of label."""
        return self._spo.list_third_ids(entity, relation)

    def heads(self, entity: int, relation: int) -> Sequence[int]:
        """Returns the subjects of facts with this object and relation, in order of label."""
        return self._pos.list_third_ids(relation, entity)

    def tail_relations(self, entity: int) -> Sequence[int]:
        """Returns the relations that lead from the entity, in order of name."""
        return self._spo.list_second_ids(entity)

    def head_relations(self, entity: int) -> Sequence[int]:
        """Returns the relations that lead to the entity, in order of name."""
        return self._ops.list_second_ids(entity)

    def triples(self) -> Iterator[Triple]:
        """Yields all facts, in order of subject, relation, object."""
        return iter(self._spo)


@lru_cache(maxsize=8)
def select_held_out_facts(graph: Graph, share: float) -> frozenset[Triple]:
    """Returns the facts held out for testing.

    All facts with the same subject and relation are held out together, selected by a hash of their
    ids. A growing graph therefore keeps its held-out facts, and a larger share includes those of a
    smaller one. Facts of a symmetric relation are held out in both directions together, selected by
    a hash of the pair.

    Args:
        share: share of these groups to hold out, in [0, 1).
    """
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
    """A graph for one episode: with permuted names, or without held-out facts.

    World 0 has the real names. In every other world, the entities of each kind exchange their
    labels, ids and aliases by a permutation drawn from the world's number, while the facts stay the
    same. An entity's number is the same in all worlds.

    Args:
        graph: the whole graph, in world 0; nothing of it is copied.
        world: number of the world, from 0.
        hide: share of hidden facts, in [0, 1); see `select_held_out_facts`.
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


class _Index:
    """Sorted triples, each packed into one key: (a·n_b + b)·n_c + c."""

    __slots__ = ("_second", "_third", "keys")

    def __init__(self, triples: Iterable[Triple], second: int, third: int) -> None:
        """Builds the index; `second` and `third` are the numbers of possible values n_b and n_c."""
        self._second, self._third = second, third
        packed = {(a * second + b) * third + c for a, b, c in triples}
        try:
            self.keys = array("Q", sorted(packed))
        except OverflowError:
            raise ValueError("the graph has too many entities and relations for 64 bits") from None

    def list_second_ids(self, a: int) -> list[int]:
        """The distinct b of triples (a, b, ·)."""
        found: list[int] = []
        width, offset = self._third, a * self._second
        at = bisect_left(self.keys, offset * width)
        end = bisect_left(self.keys, (offset + self._second) * width)
        while at < end:
            pair = self.keys[at] // width
            found.append(pair - offset)
            at = bisect_left(self.keys, (pair + 1) * width, at, end)
        return found

    def list_third_ids(self, a: int, b: int) -> list[int]:
        """The c of triples (a, b, ·)."""
        first = (a * self._second + b) * self._third
        at, end = bisect_left(self.keys, first), bisect_left(self.keys, first + self._third)
        return [key - first for key in self.keys[at:end]]

    def __iter__(self) -> Iterator[Triple]:
        for key in self.keys:
            pair, c = divmod(key, self._third)
            yield *divmod(pair, self._second), c


class _Names:
    """Ids, labels, kinds and aliases of entities or relations, by number."""

    __slots__ = ("aliases", "ids", "kinds", "labels", "numbers")

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
        self.numbers: dict[str, int] = {}
        for number, label in enumerate(self.labels):
            self._register_name(label, number)
        for number, id_ in enumerate(self.ids):
            if id_ != self.labels[number]:
                self._register_name(id_, number)
        for number, names in self.aliases.items():
            for name in names:
                self._register_name(name, number)

    def get_id_numbers(self, ids: Iterable[str]) -> "array[int]":
        """The numbers of ids, in the order of `ids`."""
        number = {id_: number for number, id_ in enumerate(self.ids)}
        return array("I", (number[id_] for id_ in ids))

    def _register_name(self, name: str, number: int) -> None:
        folded = _fold_name(name)
        if not folded:
            raise ValueError(
                f"{self.ids[number]!r} has a name without visible characters: {name!r}"
            )
        key = name if folded == name else folded  # shares one string object where they are equal
        self.numbers.setdefault(key, number)


def _fold_name(name: str) -> str:
    return escape_text(name).casefold()
