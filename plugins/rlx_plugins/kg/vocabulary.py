"""The vocabulary of a word-level tokenizer for tiny models on the task `kg`."""

from collections.abc import Iterator, Sequence
from typing import get_args

from rlx_plugins.kg.demonstrations import SPOKEN
from rlx_plugins.kg.environment import Error
from rlx_plugins.kg.graph import Graph
from rlx_plugins.kg.protocol import FUNCTIONS
from rlx_plugins.kg.questions import NO_KIND, template_words
from rlx_plugins.kg.text import escape_text

_TAGS = ("think", "kg-query", "answer")
_MARKS = ("<information>", " </information>", "(", ")", ",", ":", "\n")
_OBSERVED = ("relations", "of", "to", "with", "error", "more")


def build_kg_vocabulary(graph: Graph) -> list[str]:
    """Returns the distinct tokens of prompts, turns and observations (without hints).

    Words and names are single tokens that include their leading space, except for the first words
    of questions and the names of functions. Numbers go up to the length of the graph's longest
    list.
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
    """Yields every list that an observation may show."""
    for entity in graph.entities:
        yield graph.tail_relations(entity)
        yield graph.head_relations(entity)
        yield from (graph.tails(entity, relation) for relation in graph.tail_relations(entity))
        yield from (graph.heads(entity, relation) for relation in graph.head_relations(entity))
