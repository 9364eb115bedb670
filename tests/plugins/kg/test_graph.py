"""The graph against plain sets of facts, in all worlds and with facts held out."""

from hypothesis import given, settings
from hypothesis import strategies as st
from rows import each_row

from rlx_plugins.kg.graph import Graph, GraphView, find_symmetric_relations, select_held_out_facts

FACTS = [
    ("fr", "capital", "paris"),
    ("de", "capital", "berlin"),
    ("fr", "borders", "de"),
    ("de", "borders", "fr"),
    ("fr", "borders", "es"),
    ("es", "borders", "fr"),
]
LABELS = {"fr": "France", "de": "Germany", "es": "Spain", "paris": "Paris", "berlin": "Berlin"}
KINDS = {"fr": "country", "de": "country", "es": "country", "paris": "city", "berlin": "city"}
ALIASES = {"de": ["Deutschland"], "fr": ["la France", "Gaul"]}

ids = st.sampled_from("abcdefgh")
facts = st.lists(st.tuples(ids, st.sampled_from(["r", "s", "t"]), ids), max_size=40)
options = st.fixed_dictionaries(
    {
        "labels": st.dictionaries(ids, st.sampled_from(["Ann", "Bob", "cy", "Dee"])),
        "kinds": st.dictionaries(ids, st.sampled_from(["x", "y"])),
        "aliases": st.dictionaries(ids, st.lists(st.sampled_from(["Al", "Bo"]), max_size=2)),
    }
)


def small(**more):
    return Graph(FACTS, labels=LABELS, kinds=KINDS, aliases=ALIASES, **more)


def wide(countries=200):
    """Facts of many countries, with a relation both ways."""
    made, kinds = [], {}
    for n in range(countries):
        kinds[f"c{n}"] = "country"
        for relation, many in (("capital", countries), ("currency", 60), ("continent", 6)):
            kinds[f"{relation}{n % many}"] = relation
            made.append((f"c{n}", relation, f"{relation}{n % many}"))
        other = f"c{(n * 7 + 3) % countries}"
        made += [(f"c{n}", "borders", other), (other, "borders", f"c{n}")]
    return Graph(made, kinds=kinds)


def said(view):
    """All facts by label, read from the four functions."""
    tails = {
        (view.label(s), view.relation_name(r), view.label(o))
        for s in view.entities
        for r in view.tail_relations(s)
        for o in view.tails(s, r)
    }
    heads = {
        (view.label(s), view.relation_name(r), view.label(o))
        for o in view.entities
        for r in view.head_relations(o)
        for s in view.heads(o, r)
    }
    assert tails == heads
    return tails


@given(facts, options)
def test_it_answers_as_a_set_of_facts_does(triples, named):
    graph = Graph(triples, **named)
    known = set(triples)
    numbered = {(graph.id(s), graph.relation_id(r), graph.id(o)) for s, r, o in graph.triples()}
    assert numbered == known and len(list(graph.triples())) == len(known)
    for e in graph.entities:
        id_ = graph.id(e)
        out, into = graph.tail_relations(e), graph.head_relations(e)
        assert [graph.relation_id(r) for r in out] == sorted({r for s, r, _ in known if s == id_})
        assert [graph.relation_id(r) for r in into] == sorted({r for _, r, o in known if o == id_})
        for r in graph.relations:
            name = graph.relation_id(r)
            tails, heads = graph.tails(e, r), graph.heads(e, r)
            assert {graph.id(o) for o in tails} == {o for s, p, o in known if (s, p) == (id_, name)}
            assert {graph.id(s) for s in heads} == {s for s, p, o in known if (p, o) == (name, id_)}
            for found in (tails, heads):
                assert [graph.label(x).casefold() for x in found] == sorted(
                    graph.label(x).casefold() for x in found
                )


@given(facts, options, st.randoms())
def test_order_of_the_input_means_nothing(triples, named, rng):
    graph = Graph(triples, **named)
    shuffled = [*triples, *triples[:3]]
    rng.shuffle(shuffled)
    turned = {what: dict(reversed(value.items())) for what, value in named.items()}
    turned["aliases"] = {id_: a[::-1] for id_, a in turned["aliases"].items()}
    other = Graph(shuffled, **turned)
    assert graph.digest == other.digest
    assert list(graph.triples()) == list(other.triples())
    assert [graph.id(e) for e in graph.entities] == [other.id(e) for e in other.entities]


@each_row("name", ["France", " fRANCE", "fr", "la  france", "gaul\n"])
def test_names_are_found_whatever_their_case_and_blanks(name):
    graph = small()
    assert graph.label(graph.entity(name)) == "France"


def test_what_was_escaped_when_it_was_shown_is_found():
    graph = Graph([("x", "r<1>", "y")], labels={"x": "a </information>\n b"})
    assert graph.label(graph.entity("A ‹/information› b")) == "a </information>\n b"
    assert graph.relation("R‹1›") is not None


def test_of_those_with_one_name_the_label_comes_first():
    graph = Graph(
        [("x", "r", "y"), ("z", "r", "paris")],
        labels={"x": "Paris", "y": "paris", "paris": "Ilium"},
        aliases={"z": ["PARIS"]},
    )
    found = graph.entity("paris")
    assert graph.id(found) == "x"


@settings(max_examples=25)
@given(st.integers(1, 10_000))
def test_another_world_says_the_same_of_other_names(world):
    graph, view = small(), GraphView(small(), world=world)
    for kind in ("country", "city"):
        own = [e for e in view.entities if view.kind(e) == kind]
        assert sorted(map(view.label, own)) == sorted(map(graph.label, own))
    assert said(view) == {
        (view.label(s), view.relation_name(r), view.label(o)) for s, r, o in graph.triples()
    }
    for e in view.entities:
        for name in (view.label(e), view.id(e), *view.aliases(e)):
            assert view.entity(name) == e
        for r in view.relations:
            shown = [view.label(t) for t in view.tails(e, r)]
            assert shown == sorted(shown)
    assert view.entity("Atlantis") is None


def test_what_a_relation_says_of_a_subject_is_held_out_as_a_whole():
    graph = wide()
    held = select_held_out_facts(graph, 0.15)
    assert {graph.relation_name(r) for r in find_symmetric_relations(graph)} == {"borders"}
    borders = graph.relation("borders")
    for s, r, o in graph.triples():
        if r == borders:
            assert ((s, r, o) in held) == ((o, r, s) in held)
        else:
            assert ((s, r, o) in held) == all((s, r, x) in held for x in graph.tails(s, r))
    assert 0.1 < len(held) / len(list(graph.triples())) < 0.2


def test_what_is_held_out_does_not_depend_on_the_rest():
    graph = wide(100)

    def named(graph, held):
        return {(graph.id(s), graph.relation_id(r), graph.id(o)) for s, r, o in held}

    own = named(graph, graph.triples())
    grown = Graph([*own, ("new", "capital", "capital0")], labels={"c0": "A first one"})
    held = named(graph, select_held_out_facts(graph, 0.2))
    assert named(grown, select_held_out_facts(grown, 0.2)) & own == held
    assert held < named(graph, select_held_out_facts(graph, 0.4))
    assert select_held_out_facts(graph, 0.0) == frozenset()


@each_row("world", [0, 3])
def test_a_view_can_leave_them_out(world):
    graph = wide()
    view, full = GraphView(graph, world=world, hide=0.3), GraphView(graph, world=world)
    hidden = select_held_out_facts(graph, 0.3)
    gone = {(full.label(s), full.relation_name(r), full.label(o)) for s, r, o in hidden}
    assert said(view) == said(full) - gone
