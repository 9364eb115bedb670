"""Prompts with topic entities: what is shown can be copied into a query, and holds no tag."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import each_row

from rlx_plugins.kg.graph import Graph
from rlx_plugins.kg.protocol import read_query
from rlx_plugins.kg.task import KgTask
from rlx_plugins.kg.text import fill_prompt

SHOWN = "{question}\nfrom {entities}"


def test_a_prompt_shows_the_question_and_its_entities():
    assert fill_prompt("{question}", "who?", ["Ada"]) == "who?"
    assert fill_prompt(SHOWN, "who?", ["Ada", "Bob, Jr."]) == 'who?\nfrom "Ada", "Bob, Jr."'
    assert fill_prompt(SHOWN, "who?", ['"Weird Al"']) == "who?\nfrom '\"Weird Al\"'"
    assert fill_prompt(SHOWN, "who?", []) == "who?\nfrom none"


@given(st.text(min_size=1, max_size=30).filter(lambda t: not {'"', "'"} <= {*t}))
def test_an_entity_can_be_copied_into_a_query(name):
    shown = fill_prompt("{question}{entities}", "", [name])
    assert not {"<", ">", "\n"} & {*shown}
    query = read_query(f"get_tail_relations({shown})")
    if query is None:
        assert not shown[1:-1].strip()
        return
    graph = Graph([(name, "knows", "somebody else")])
    assert graph.entity(query.arguments[0]) == graph.entity(name) is not None


@each_row(
    "template",
    [
        "",
        "{entities}",
        "{question} {answer}",
        "{question!r}",
        "{question:>9}",
        "{question} {",
        "{}",
    ],
)
def test_other_templates_are_refused(template):
    with pytest.raises(ValueError, match=r"prompt\n.*(must hold|a field is a name|Single)"):
        KgTask(prompt=template)
