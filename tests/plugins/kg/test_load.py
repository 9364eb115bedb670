"""Graphs from files, and what is said of files that are something else."""

import gzip
import json
import os

import pytest
from rows import each_row

from rlx_plugins.kg.load import load_world_graph, read_graph
from rlx_plugins.kg.ntriples import RdfLiteral, parse_statement

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
JSONL = "\n".join(
    json.dumps(record)
    for record in [
        {"id": "fr", "label": "France", "kind": "country", "aliases": ["Gaul", "la France"]},
        {"subject": "de", "relation": "borders", "object": "fr"},
        {"id": "paris", "label": "Paris"},
        {"subject": "fr", "relation": "borders", "object": "de"},
        {"subject": "fr", "relation": "capital", "object": "paris"},
    ]
)
RDFS, SKOS = "http://www.w3.org/2000/01/rdf-schema#", "http://www.w3.org/2004/02/skos/core#"
NT = f"""\
# comment
<http://x/fr> <http://p/capital> <http://x/City#paris> .
<http://x/fr><http://p/borders>_:b1. # a blank node
<http://x/fr> <http://p/population> "68"^^<http://www.w3.org/2001/XMLSchema#int> .
<http://x/fr> <{RDFS}label> "Frankreich"@de .
<http://x/fr> <{RDFS}label> "Formerly Gaul"@en-GB .
<http://x/fr> <{RDFS}label> "Fran\\u0063e"@en .
<http://x/fr> <{SKOS}altLabel> "Gaul" .
_:b1 <http://q/borders> <http://y/fr/> .
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
        ("g.jsonl", JSONL),
        ("g.jsonl.gz", JSONL),
    ],
)
def test_formats_say_the_same(tmp_path, name, content):
    graph = read_graph(written(tmp_path, name, content))
    assert graph.digest == read_graph(written(tmp_path, "other.tsv", TSV)).digest
    france = graph.entity("France")
    assert (graph.kind(france), graph.aliases(france)) == ("country", ("Gaul", "la France"))
    assert [graph.label(e) for e in graph.tails(france, graph.relation("capital"))] == ["Paris"]
    assert len(graph) == 3


def test_ntriples(tmp_path):
    graph = read_graph(written(tmp_path, "g.nt.gz", NT))
    france = graph.entity("France")
    assert graph.id(france) == "http://x/fr"
    assert graph.aliases(france) == ("Formerly Gaul", "Frankreich", "Gaul")
    assert {graph.relation_name(r) for r in graph.relations} == {
        *("capital", "population"),
        *("http://p/borders", "http://q/borders"),  # both end in the same
    }
    (number,) = graph.tails(france, graph.relation("population"))
    assert graph.label(number) == "68"
    assert graph.id(number) == '"68"^^http://www.w3.org/2001/XMLSchema#int'
    assert {graph.label(e) for e in graph.entities} == {"France", "paris", "68", "_:b1", "fr"}
    assert len(graph) == 4


@each_row(
    ("line", "expected"),
    [
        ('_:a <x:p> "a\\n\\"\\U0001F600"@en-GB.', RdfLiteral('a\n"😀', "en-gb", "")),
        ('_:a <x:p> "" .', RdfLiteral("", "", "")),
        ('_:a <x:p> "1"^^<x:int> .', RdfLiteral("1", "", "x:int")),
        ("_:a<x:p>_:b.c.", "_:b.c"),
        ("_:a\t<x:p> <x:\\u00e9> .#", "x:é"),
    ],
)
def test_statements(line, expected):
    assert parse_statement(line) == ("_:a", "x:p", expected)


@each_row("line", ["", " \t\r\n", "# <x:a> <x:b> <x:c> ."])
def test_lines_that_say_nothing(line):
    assert parse_statement(line) is None


@each_row(
    "line",
    [
        "<x:a> <x:b> <x:c>",
        "<x:a> <x:b> .",
        "<relative> <x:b> <x:c> .",
        "<x:a> _:b <x:c> .",
        '"a" <x:b> <x:c> .',
        "<x:a> <x:b> <x:c d> .",
        '<x:a> <x:b> "a\\z" .',
        '<x:a> <x:b> "\\uD800" .',
        '<x:a> <x:b> "\\U00110000" .',
        '<x:a> <x:b> "a" "b" .',
        '<x:a> <x:b> "a"@ .',
        "<x:a> <x:b> 'a' .",
        "_:a:b <x:b> <x:c> .",
        "<x:a> <x:b> <x:c> . <x:a> <x:b> <x:d> .",
    ],
)
def test_what_is_no_statement_is_refused(line):
    with pytest.raises(ValueError, match=r"expected a statement|is not a character"):
        parse_statement(line)


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
        ("g.jsonl", '{"subject": "a"}', "line 1: expected the keys subject, relation and object"),
        ("g.jsonl", '{"id": "a", "name": "b"}', "got id, name"),
        ("g.jsonl", '{"id": "a", "label": 3}', "as label, got 3"),
        ("g.jsonl", '{"id": "\\ud83d"}', "a lone surrogate is not a character: '\\ud83d'"),
        (
            "g.jsonl",
            '{"id": "a", "aliases": ["\\u202e"]}',
            "line 1: expected visible text",
        ),
        ("g.jsonl", '{"id": "a", "aliases": "b"}', "expected a list of texts as aliases"),
        ("g.jsonl", '\n["a"]', "line 2: not a JSON object"),
        ("g.jsonl", "{", "line 1: not JSON: "),
        ("g.nt", "<a> <x:b> <x:c> .", "line 1: expected a statement of N-Triples"),
        ("g.ttl", "", "must end in one of .tsv, .jsonl, .nt, perhaps with .gz after it"),
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
    for name, data in (("no.tsv.gz", b"text"), ("cut.tsv.gz", gzip.compress(TSV.encode())[:-9])):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ValueError, match="not readable as gzip"):
            read_graph(path)


def test_the_shipped_world_opens():
    graph = load_world_graph()
    france, borders = graph.entity("france"), graph.relation("borders")
    assert "Spain" in [graph.label(e) for e in graph.tails(france, borders)]
    assert graph.clashes == {}
