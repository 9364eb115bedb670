"""Questions: right answers by another way of counting, and splits that share no fact."""

from collections import defaultdict

from rows import each_row

from rlx_plugins.kg.graph import load_world_graph, select_held_out_facts
from rlx_plugins.kg.questions import TYPES, build_question_population

GRAPH = load_world_graph()
SHARE = 0.15
SPLITS = build_question_population(GRAPH, SHARE)
# By relation, from a subject and to an object: another index than the graph's.
FACTS = {"tail": defaultdict(set), "head": defaultdict(set)}
for subject, relation, object_ in GRAPH.triples():
    FACTS["tail"][subject, relation].add(object_)
    FACTS["head"][object_, relation].add(subject)
FACTS["both"] = FACTS["tail"]  # where it holds both ways


def walk(question):
    """Every path along the chain from the first start: its facts, and where it ends."""
    found = [(set(), question.starts[0])]
    for direction, relation in question.chain:
        longer = []
        for path, at in found:
            for other in FACTS[direction][at, relation]:
                fact = (other, relation, at) if direction == "head" else (at, relation, other)
                longer.append((path | {fact}, other))
        found = longer
    return found


@each_row("type_", TYPES)
def test_right_answers_are_all_that_the_facts_say(type_):
    asked = SPLITS["train"][type_] + SPLITS["test"][type_]
    assert asked
    for question in asked:
        if type_ == "intersection":
            sets = [
                FACTS[direction][start, relation]
                for start, (direction, relation) in zip(
                    question.starts, question.chain, strict=True
                )
            ]
            assert set(question.answers) == sets[0] & sets[1]
            assert all(s - set(question.answers) for s in sets)
            continue
        at = {end for _, end in walk(question)}
        assert set(question.answers) == at
        assert len(question.answers) == len(at) > 0


def paths(question):
    """Every path to every right answer, by its facts."""
    if question.type == "intersection":
        ways = [
            {(a, r, s) if d == "head" else (s, r, a)}
            for a in question.answers
            for s, (d, r) in zip(question.starts, question.chain, strict=True)
        ]
        return [ways[i] | ways[i + 1] for i in range(0, len(ways), 2)]
    walked = [path for path, _ in walk(question)]
    return [set().union(*walked)] if question.type == "count" else walked


@each_row("type_", TYPES)
def test_training_needs_no_held_out_fact_and_every_path_of_testing_does(type_):
    held = select_held_out_facts(GRAPH, SHARE)
    for question in SPLITS["train"][type_][::7]:
        assert not any(path & held for path in paths(question))
    for question in SPLITS["test"][type_][::7]:
        assert all(path & held for path in paths(question))
