"""Every token that a word-level tokenizer needs, so that a tiny model can read and write here."""

from collections.abc import Iterator, Sequence
from typing import get_args

from rlx_plugins.kg.demonstrations import SPOKEN
from rlx_plugins.kg.environment import Error
from rlx_plugins.kg.graph import Graph
from rlx_plugins.kg.protocol import FUNCTIONS
from rlx_plugins.kg.questions import NO_KIND, template_words
from rlx_plugins.kg.text import escape_text

__all__ = ["build_kg_vocabulary"]

_TAGS = ("think", "kg-query", "answer")
_MARKS = ("<information>", " </information>", "(", ")", ",", ":", "\n")
_OBSERVED = ("relations", "of", "to", "with", "error", "more")


def build_kg_vocabulary(graph: Graph) -> list[str]:
    """Returns the tokens of prompts, turns and observations (without hints), each once.

    A word or name is one token, its leading blank included, but for the words that a question
    begins with and the names of functions; numbers go as far as the longest list of the graph.
    """
    first, later = template_words()
    kinds = [graph.kind(entity) or NO_KIND for entity in graph.entities]
    words = [*first, *later, *SPOKEN, *_OBSERVED, *sorted(set(kinds)), *get_args(Error)]
    names = [escape_text(graph.relation_name(relation)) for relation in graph.relations]
    names += [escape_text(graph.label(entity)) for entity in graph.entities]
    longest = max(map(len, _list_observable_sequences(graph)), default=0)
    numbers = [str(n) for n in range(1, longest + 1)] + [f"+{n}" for n in range(1, longest)]
    tokens = [tag for name in _TAGS for tag in (f"<{name}>", f"</{name}>")]
    tokens += [*_MARKS, *FUNCTIONS, *first, *(f" {word}" for word in [*words, *numbers, *names])]
    return list(dict.fromkeys(tokens))


def _list_observable_sequences(graph: Graph) -> Iterator[Sequence[int]]:
    """All that an observation could list."""
    for entity in graph.entities:
        yield graph.tail_relations(entity)
        yield graph.head_relations(entity)
        yield from (graph.tails(entity, relation) for relation in graph.tail_relations(entity))
        yield from (graph.heads(entity, relation) for relation in graph.head_relations(entity))
