"""The shipped graph of the world: its names, and where it comes from."""

import re
from collections import Counter
from pathlib import Path

from babel.core import get_cldr_version
from world_source import build_world_table

import rlx_plugins
from rlx_plugins.kg.graph import load_world_graph

WORLD = Path(rlx_plugins.__file__).parent / "kg" / "data" / "world.tsv"
GRAPH = load_world_graph()


def test_every_name_means_one_entity():
    """Labels, aliases and ids, in any case: a question or an answer can never mean two things."""
    names = Counter(
        name
        for e in GRAPH.entities
        for name in {n.casefold() for n in (GRAPH.id(e), GRAPH.label(e), *GRAPH.aliases(e))}
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_file_is_what_the_builder_makes():
    text = WORLD.read_text(encoding="utf-8")
    assert re.search(r"Unicode CLDR (\S+)", text)[1] == get_cldr_version()
    assert build_world_table() == text
