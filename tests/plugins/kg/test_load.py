"""Graphs from files, and what is said of files that are something else."""

import gzip
import os

import pytest
from rows import each_row

from rlx_plugins.kg.load import load_world_graph, read_graph

TSV = """\
# two countries
fr\tcapital\tparis
fr\tborders\tde
de\tborders\tfr

fr\trlx:label\tFrance
fr\trlx:kind\tcountry
fr\trlx:alias\tla France
paris\trlx:label\tParis
fr\trlx:alias\tGaul
"""


def written(tmp_path, name, content):
    path = tmp_path / name
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@each_row(
    ("name", "content"),
    [
        ("g.tsv", TSV),
        ("g.tsv.gz", TSV),
        ("g.tsv", "\ufeff" + TSV.replace("\n", "\r\n")),
    ],
)
def test_formats_say_the_same(tmp_path, name, content):
    graph = read_graph(written(tmp_path, name, content))
    assert graph.digest == read_graph(written(tmp_path, "other.tsv", TSV)).digest
    france = graph.entity("France")
    assert (graph.kind(france), graph.aliases(france)) == ("country", ("Gaul", "la France"))
    assert [graph.label(e) for e in graph.tails(france, graph.relation("capital"))] == ["Paris"]
    assert len(graph) == 3


@each_row(
    ("name", "content", "message"),
    [
        ("g.tsv", "a\tr\tb\na\tr\n", "line 2: expected subject, relation and object separated"),
        ("g.tsv", "a\t\tb\n", "got 2 of them in 3 columns"),
        ("g.tsv", "a\trlx:name\tb\n", "line 1: expected rlx:label, rlx:kind or rlx:alias, got"),
        ("g.tsv", "a\trlx:label\tb\na\trlx:label\tc\n", "line 2: 'a' has two labels: 'b' and 'c'"),
        ("g.tsv", b"a\tr\tb\n\xff\tr\tb\n", "line 2: not UTF-8"),
        ("g.tsv", "a\tr\tb\na\tr\t\u200b\n", "line 2: expected visible text, got"),
        ("g.tsv", "# nothing\n", "g.tsv: has no facts"),
        ("g.tsv.gz", b"", "has no facts"),
        ("g.ttl", "", "g.ttl: its name must end in .tsv or .tsv.gz"),
    ],
)
def test_malformed_files_are_refused_by_place(tmp_path, name, content, message):
    path = written(tmp_path, name, content)
    with pytest.raises(ValueError) as caught:
        read_graph(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "g.tsv"
    with pytest.raises(OSError) as caught:
        read_graph(missing)
    assert str(caught.value) == f"cannot read {missing}: {os.strerror(2)}"
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress(TSV.encode())[:-9])
    with pytest.raises(ValueError, match=r"cut\.tsv\.gz: not readable as gzip"):
        read_graph(path)


def test_the_shipped_world_opens():
    graph = load_world_graph()
    france, borders = graph.entity("france"), graph.relation("borders")
    assert "Spain" in [graph.label(e) for e in graph.tails(france, borders)]
