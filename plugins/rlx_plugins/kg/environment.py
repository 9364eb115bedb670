"""The environment `kg`: a knowledge graph that answers the agent's queries within a budget."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlx.plugin import Action, Environment, Step
from rlx_plugins.kg.graph import Graph, GraphView, load_world_graph
from rlx_plugins.kg.protocol import FUNCTIONS, KgQuery, read_query, read_turn
from rlx_plugins.kg.text import OVERHEAD, escape_text, format_information, format_label_list

Error = Literal[
    "KG_SUCCESS",
    "FORMAT_ERROR",
    "SAMPLE_NOT_FOUND",
    "ENTITY_NOT_FOUND",
    "RELATION_NOT_FOUND",
    "NO_RESULTS",
    "INVALID_ACTION",
    "QUERY_BUDGET",
]
"""Result codes of a turn: KG-R1's without SERVER_ERROR (an internal error is not an observation),
and two more: no action, and query budget exceeded."""

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
}

_Key = tuple[str, ...]
_Facts = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class KgState:
    """State of a rollout. `facts` are those of a question with its own graph. `queries` counts all,
    malformed and refused ones too; `answered` are the distinct ones that returned results."""

    world: int
    hide: float
    seed: int
    facts: _Facts | None
    queries: int = 0
    distinct_queries: tuple[_Key, ...] = ()
    answered: tuple[_Key, ...] = ()

    @property
    def anchor(self) -> str:
        """A digest that is equal for rollouts of one problem that have seen the same results."""
        return hashlib.sha256(repr(sorted(self.answered)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _ResolvedQuery:
    """The result of a query; `unknown` is a name that was not found."""

    error: Error
    key: _Key
    unknown: str = ""
    heading: str = ""
    labels: Sequence[str] = ()


class KgEnvironment(Environment):
    """A knowledge graph with KG-R1's four functions; an answer ends the rollout.

    Reads the problem's `world` and `hide`, and `triples` if the question has its own graph.
    """

    kinds: ClassVar[tuple[str, ...]] = ("kg_query", "answer", "invalid")
    repeats: ClassVar[str] = "duplicate"

    max_queries: int | None = Field(None, ge=1)
    """Maximum number of queries per rollout, including malformed ones; null leaves the limit to
    `max_turns`."""
    limit: int = Field(8, ge=1)
    """Maximum number of results shown; of further results only their number is shown."""
    max_chars: int = Field(2000, ge=OVERHEAD + 60)
    """Maximum number of characters of an observation, including its tags."""
    order: Literal["sorted", "shuffled"] = "sorted"
    """Show results by name, or in random order by the rollout's seed and the turn."""
    hints: bool = True
    """Whether errors include a hint; false shows only the error code."""

    def data(self) -> Mapping[str, str]:
        return {"graph": load_world_graph().digest}

    def reset(self, problem: Mapping[str, Any], seed: int) -> KgState:
        facts = problem.get("triples")
        return KgState(
            world=problem.get("world", 0),
            hide=problem.get("hide", 0.0),
            seed=seed,
            facts=None if facts is None else tuple((s, r, o) for s, r, o in facts),
        )

    def step(self, state: KgState, action: Action) -> Step:
        """Plays one turn, whose info says `valid` of a query that returned results."""
        kind, content = read_turn(action.text)
        observation, info = "", dict[str, Any]()
        if kind == "answer":
            info = {"queries": state.queries, "without_query": not state.queries}
        elif kind == "invalid":
            observation, info = self._refusal("INVALID_ACTION"), {"error": "INVALID_ACTION"}
        else:
            state, observation, info = self._answer_query(state, action, read_query(content))
        return Step(
            kind=kind,
            state=state,
            observation=observation,
            done=kind == "answer",
            info=info,
            anchor=state.anchor,
        )

    def _answer_query(
        self, state: KgState, action: Action, query: KgQuery | None
    ) -> tuple[KgState, str, dict[str, Any]]:
        spent = self.max_queries is not None and state.queries >= self.max_queries
        found = _ResolvedQuery("FORMAT_ERROR", ())
        if action.forced or spent:
            found = _ResolvedQuery("QUERY_BUDGET", ())
        elif query is not None:
            found = _find_query_results(_view_graph(state), query)
        duplicate = bool(found.key) and found.key in state.distinct_queries
        labels, observation = self._format_results(found, state.seed, action.number)
        state = replace(state, queries=state.queries + 1)
        if found.key and not duplicate:
            state = replace(state, distinct_queries=(*state.distinct_queries, found.key))
            if found.labels:
                state = replace(state, answered=(*state.answered, found.key))
        info = {
            "valid": found.error == "KG_SUCCESS",
            "error": found.error,
            "duplicate": duplicate,
            "function": "unreadable" if query is None else query.function,
            "results": labels,
        }
        return state, observation, info

    def _format_results(
        self, found: _ResolvedQuery, seed: int, number: int
    ) -> tuple[list[str], str]:
        if found.error != "KG_SUCCESS":
            return [], self._refusal(found.error, found.unknown)
        labels = list(found.labels)
        if self.order == "shuffled":
            random.Random(f"kg/{seed}/{number}").shuffle(labels)
        count, body = format_label_list(
            labels, prefix=found.heading, limit=self.limit, max_chars=self.max_chars - OVERHEAD
        )
        return labels[:count], format_information(body, self.max_chars)

    def _refusal(self, error: Error, unknown: str = "") -> str:
        body = f"error {error}"
        if self.hints:
            body += f": {_HINTS[error]}".format(name=escape_text(unknown))
        return format_information(body, self.max_chars)


def _view_graph(state: KgState) -> Graph | None:
    if state.facts is None:
        return GraphView(load_world_graph(), world=state.world, hide=state.hide)
    return _build_graph(state.facts) if state.facts else None


_build_graph = lru_cache(maxsize=64)(Graph)


def _find_query_results(view: Graph | None, query: KgQuery) -> _ResolvedQuery:
    """Executes a query. `get_head_entities` also accepts its arguments in reverse order, as in
    KG-R1's paper, if more of them can be resolved that way."""
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
    """A key that is equal for all names of one entity, and for all spellings of an unknown name."""
    return f"unknown {' '.join(name.casefold().split())}" if number is None else f"known {number}"
