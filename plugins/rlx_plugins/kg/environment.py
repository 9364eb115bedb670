"""The environment `kg`: a graph that answers the agent's queries, within a budget."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlx.plugin import Action, Environment, Step
from rlx_plugins.kg.graph import Graph
from rlx_plugins.kg.protocol import FUNCTIONS, KgQuery, read_query, read_turn
from rlx_plugins.kg.source import WORLD, load_named_graph
from rlx_plugins.kg.text import (
    OVERHEAD,
    count_fitting_labels,
    escape_text,
    format_information,
    format_label_list,
)
from rlx_plugins.kg.view import GraphView

__all__ = ["Error", "KgEnvironment", "KgState"]

Error = Literal[
    "KG_SUCCESS",
    "FORMAT_ERROR",
    "SAMPLE_NOT_FOUND",
    "ENTITY_NOT_FOUND",
    "RELATION_NOT_FOUND",
    "NO_RESULTS",
    "INVALID_ACTION",
    "QUERY_BUDGET",
    "DUPLICATE_QUERY",
]
"""What became of a turn: KG-R1's types but SERVER_ERROR (a fault of ours is no observation), and
for turns without an action, beyond the budget, and refused for being a repetition."""

_SYNTAX = ", ".join(
    f"{name}( entity{', relation' if count == 2 else ''})" for name, count in FUNCTIONS.items()
)
_HINTS: Mapping[Error, str] = {
    "FORMAT_ERROR": f"write one of {_SYNTAX}",
    "SAMPLE_NOT_FOUND": "this question has no graph",
    "ENTITY_NOT_FOUND": "{name} is not in the graph; write names as they were shown",
    "RELATION_NOT_FOUND": "{name} is no relation; get_tail_relations and get_head_relations "
    "list those of an entity",
    "NO_RESULTS": "the graph has nothing there; try another relation or the other direction",
    "INVALID_ACTION": "end each turn with a kg-query or an answer between its tags",
    "QUERY_BUDGET": "no query is left: answer now",
    "DUPLICATE_QUERY": "you asked this before; its results still stand above",
}

_Key = tuple[str, ...]
_Facts = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class KgState:
    """What a rollout's environment knows between turns.

    Attributes:
        world: number of the world whose names are read and shown, 0 for the real one.
        hide: share of the facts that are held out of it.
        seed: of the rollout.
        facts: the question's own graph, by names; None for the environment's.
        queries: how many were asked, malformed and refused ones included.
        asked: the well-formed ones, each once, in order.
        answered: those of them that gave results.
    """

    world: int
    hide: float
    seed: int
    facts: _Facts | None
    queries: int = 0
    asked: tuple[_Key, ...] = ()
    answered: tuple[_Key, ...] = ()

    @property
    def anchor(self) -> str:
        """The same for rollouts of one problem that have been shown the same results."""
        return hashlib.sha256(repr(sorted(self.answered)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _ResolvedQuery:
    """A query against the graph, its names looked up; `unknown` is the one that was not found."""

    error: Error
    key: _Key
    unknown: str = ""
    heading: str = ""
    labels: Sequence[str] = ()


class KgEnvironment(Environment):
    """A knowledge graph with KG-R1's four functions; an answer ends the rollout.

    Reads of the problem `world` and `hide`, and `triples` where a question has its own graph.
    """

    kinds: ClassVar[tuple[str, ...]] = ("kg_query", "answer", "invalid")

    graph: str = WORLD
    """`world`, the shipped one, or the path of a graph's file."""
    max_queries: int | None = Field(None, ge=1)
    """Queries of a rollout, malformed ones included; null leaves it to `max_turns`."""
    limit: int = Field(8, ge=1)
    """Results that are shown; of the others only how many there are."""
    max_chars: int = Field(2000, ge=OVERHEAD + 60)
    """Characters of an observation, its tags included."""
    order: Literal["sorted", "shuffled"] = "sorted"
    """Results by name, or in an order drawn from the rollout's seed and the turn."""
    hints: bool = True
    """Whether an error says what to do; false shows its name alone."""
    duplicates: Literal["answer", "refuse"] = "answer"
    """Whether a query that was asked before is shown its results again, or an error."""

    def check(self) -> None:
        """Opens the graph.

        Raises:
            OSError: its file cannot be read.
            ValueError: it is malformed.
        """
        load_named_graph(self.graph)

    def data(self) -> Mapping[str, str]:
        """The graph's digest, as `Graph.digest`."""
        return {"graph": load_named_graph(self.graph).digest}

    def reset(self, problem: Mapping[str, Any], seed: int) -> KgState:
        """Returns the state that a rollout begins in."""
        facts = problem.get("triples")
        return KgState(
            world=problem.get("world", 0),
            hide=problem.get("hide", 0.0),
            seed=seed,
            facts=None if facts is None else tuple((s, r, o) for s, r, o in facts),
        )

    def step(self, state: KgState, action: Action) -> Step:
        """Answers one turn.

        The turn's info: of an answer how many `queries` went before it, and whether it came
        `without_query`; of a query `valid` (it gave results), `error`, `duplicate` (it was asked
        before), `function` and `results`, the labels that were shown; of a turn without an action
        `error`.
        """
        kind, content = read_turn(action.text)
        if kind == "answer":
            asked = state.queries
            info = {"queries": asked, "without_query": not asked}
            return Step(kind=kind, state=state, done=True, info=info, anchor=state.anchor)
        if kind == "invalid":
            return Step(
                kind=kind,
                state=state,
                observation=self._refusal("INVALID_ACTION"),
                info={"error": "INVALID_ACTION"},
                anchor=state.anchor,
            )
        return self._answer_query(state, action, read_query(content))

    def _answer_query(self, state: KgState, action: Action, query: KgQuery | None) -> Step:
        spent = self.max_queries is not None and state.queries >= self.max_queries
        found = _ResolvedQuery("FORMAT_ERROR", ())
        if action.forced or spent:
            found = _ResolvedQuery("QUERY_BUDGET", ())
        elif query is not None:
            found = _find_query_results(self._view(state), query)
        duplicate = bool(found.key) and found.key in state.asked
        if duplicate and self.duplicates == "refuse":
            found = _ResolvedQuery("DUPLICATE_QUERY", found.key)
        shown, observation = self._format_results(found, state.seed, action.number)
        state = replace(state, queries=state.queries + 1)
        if found.key and not duplicate:
            state = replace(state, asked=(*state.asked, found.key))
            if found.labels:
                state = replace(state, answered=(*state.answered, found.key))
        info = {
            "valid": found.error == "KG_SUCCESS",
            "error": found.error,
            "duplicate": duplicate,
            "function": "unreadable" if query is None else query.function,
            "results": shown,
        }
        return Step(
            kind="kg_query", state=state, observation=observation, info=info, anchor=state.anchor
        )

    def _view(self, state: KgState) -> GraphView | None:
        """What a rollout sees of the graph; None where its question has an empty one."""
        if state.facts is None:
            return GraphView(load_named_graph(self.graph), world=state.world, hide=state.hide)
        return GraphView(_build_fact_graph(state.facts)) if state.facts else None

    def _format_results(
        self, found: _ResolvedQuery, seed: int, number: int
    ) -> tuple[list[str], str]:
        """The labels that are shown, and the observation."""
        if found.error != "KG_SUCCESS":
            return [], self._refusal(found.error, found.unknown)
        labels = list(found.labels)
        if self.order == "shuffled":
            random.Random(f"kg/{seed}/{number}").shuffle(labels)
        room = self.max_chars - OVERHEAD
        count = count_fitting_labels(labels, prefix=found.heading, limit=self.limit, max_chars=room)
        body = format_label_list(labels, prefix=found.heading, limit=self.limit, max_chars=room)
        return labels[:count], format_information(body, max_chars=self.max_chars)

    def _refusal(self, error: Error, unknown: str = "") -> str:
        body = f"error {error}"
        if self.hints:
            body += f": {_HINTS[error]}".format(name=escape_text(unknown))
        return format_information(body, max_chars=self.max_chars)


@lru_cache(maxsize=64)
def _build_fact_graph(facts: _Facts) -> Graph:
    return Graph.from_triples(facts)


def _find_query_results(view: GraphView | None, query: KgQuery) -> _ResolvedQuery:
    """Looks up what a query names, and what it asks for.

    `get_head_entities` takes its arguments the other way round too, as KG-R1's paper writes it,
    where more of them are names that way.
    """
    if view is None:
        return _ResolvedQuery("SAMPLE_NOT_FOUND", (query.function, *query.arguments))
    name, relation_name = (*query.arguments, "")[:2]
    entity, relation = view.entity(name), view.relation(relation_name)
    if query.function == "get_head_entities":
        turned = view.entity(relation_name), view.relation(name)
        if turned.count(None) < (entity, relation).count(None):
            (entity, relation), name, relation_name = turned, relation_name, name
    tails = query.function.startswith("get_tail")
    one = FUNCTIONS[query.function] == 1
    key: _Key = (query.function, _build_name_key(entity, name))
    if not one:
        key += (_build_name_key(relation, relation_name),)
    if entity is None:
        return _ResolvedQuery("ENTITY_NOT_FOUND", key, name)
    label = view.label(entity)
    if one:
        numbers = view.tail_relations(entity) if tails else view.head_relations(entity)
        heading = f"relations {'of' if tails else 'to'} {label}:"
        labels = [view.relation_name(number) for number in numbers]
    elif relation is None:
        return _ResolvedQuery("RELATION_NOT_FOUND", key, relation_name)
    else:
        numbers = view.tails(entity, relation) if tails else view.heads(entity, relation)
        verb = view.relation_name(relation)
        heading = f"{verb} of {label}:" if tails else f"with {verb} {label}:"
        labels = [view.label(number) for number in numbers]
    error: Error = "KG_SUCCESS" if labels else "NO_RESULTS"
    return _ResolvedQuery(error, key, heading=heading, labels=labels)


def _build_name_key(number: int | None, name: str) -> str:
    """The same for all names of one thing, and for all spellings of an unknown one."""
    return f"unknown {' '.join(name.casefold().split())}" if number is None else f"known {number}"
