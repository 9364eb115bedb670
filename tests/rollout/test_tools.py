"""Tools: how calls are read, what is wrong with some, and rollouts with results."""

import json

import pytest
from rows import each_row
from speech import Speaking

from rlx.errors import SpecError
from rlx.model.tokenizer import build_vocabulary_dialogue
from rlx.model.vocabulary import Vocabulary
from rlx.plugin import Action, Problem, ToolCall
from rlx.rollout import (
    HostFault,
    LocalHost,
    ToolHost,
    build_rollout_plan,
    describe_tools,
    list_schemas,
    read_calls,
    sample_rollout_trees,
)
from rlx.rollout.tools import LONGEST_RESULT, MOST_CALLS, Tools, limit_calls
from rlx.spec import EnvironmentRolloutSpec

NAMES = ("look_up", "add_up", "repeat", "hang", "die")
TOOLS = tuple(f"tool_examples:{name}" for name in NAMES)
FORM = 'a call is written as {"name": ..., "arguments": {...}} between its tags'
BYTES = build_vocabulary_dialogue(Vocabulary.build_bytes())


def written(name, **arguments):
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


def test_a_schema_is_of_the_types_and_the_docstring():
    (schema,) = list_schemas(TOOLS[:1])
    assert schema["type"] == "function"
    told = schema["function"]
    assert (told["name"], told["description"]) == ("look_up", "Looks up a price.")
    assert told["parameters"] == {
        "type": "object",
        "properties": {
            "item": {"type": "string", "description": "what is sold"},
            "currency": {
                "type": "string",
                "enum": ["cent", "mark"],
                "description": "of the price",
            },
        },
        "required": ["item"],
    }


REFUSED = {
    "no module": (["no_such:tool"], "rollout.tools[0]: ModuleNotFoundError: No module"),
    "no function": (["tool_examples:fly"], "AttributeError"),
    "no docstring": (["tool_examples:undocumented"], "no docstring"),
    "no function at all": (["tool_examples:PRICES"], "PRICES is a dict, not a function"),
    "twice": ([TOOLS[0], TOOLS[0]], "rollout.tools[1]: ValueError: there are two tools 'look_up'"),
}


@each_row("uses, why", REFUSED.values(), ids=list(REFUSED))
def test_what_is_no_tool_is_refused(uses, why):
    with pytest.raises(SpecError) as refused:
        list_schemas(uses)
    assert why in str(refused.value)


CALLS = [
    ("7", "7", []),
    (f"so {written('f', x=1)} then", "so  then", [ToolCall("f", {"x": 1})]),
    (written("f") + written("g", y="é"), "", [ToolCall("f", {}), ToolCall("g", {"y": "é"})]),
    ('<tool_call>{"name": "f", "parameters": {"x": 2}}', "", [ToolCall("f", {"x": 2})]),
    ("<tool_call>{nonsense}</tool_call>", None, [ToolCall("", {}, FORM)]),
    ("<tool_call>" + "[" * 100_000, None, [ToolCall("", {}, FORM)]),
    ('<tool_call>{"arguments": {}}</tool_call>', None, [ToolCall("", {}, FORM)]),
    (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "",
        [ToolCall("f", {}, "the arguments are not a JSON object")],
    ),
    (
        "<tool_call>\n<function=look_up>\n<parameter=item>\n12\n</parameter>\n"
        "<parameter=more>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "",
        [ToolCall("look_up", {"item": "12", "more": [1, 2]})],
    ),
]


@each_row("text, content, calls", CALLS)
def test_calls_are_read_as_json_or_as_functions_in_tags(text, content, calls):
    read = read_calls(text, list_schemas(TOOLS))
    expected = text if content is None else content
    assert (read.content, list(read.calls)) == (expected, calls)


def test_a_bare_call_is_the_whole_turn():
    text = '{"name": "f", "parameters": {"x": 1}}'
    assert read_calls(text, (), bare=True).calls == (ToolCall("f", {"x": 1}),)
    assert read_calls(f"so {text}", (), bare=True).calls == ()
    assert read_calls("{", (), bare=True).calls == ()


ANSWERS = [
    (ToolCall("look_up", {"item": "figs"}), "7", ""),
    (ToolCall("look_up", {"item": "figs", "currency": "mark"}), "700", ""),
    (ToolCall("add_up", {"numbers": [1, "2"]}), "3", ""),
    (
        ToolCall("fly", {}),
        "error: there is no tool 'fly'; there are " + ", ".join(NAMES),
        "invalid",
    ),
    (ToolCall("", {}, FORM), f"error: {FORM}", "invalid"),
    (ToolCall("look_up", {"item": 3}), "error: item: Input should be a valid string", "invalid"),
    (ToolCall("look_up", {}), "error: item: Missing required argument", "invalid"),
    (
        ToolCall("look_up", {"item": "figs", "size": 1}),
        "error: size: Unexpected keyword argument",
        "invalid",
    ),
    (
        ToolCall("look_up", {"item": "figs", "currency": "dollar"}),
        "error: currency: Input should be 'cent' or 'mark'",
        "invalid",
    ),
    (ToolCall("look_up", {"item": "moons"}), "error: KeyError: 'moons'", "failed"),
    (
        ToolCall("repeat", {"text": "x", "times": LONGEST_RESULT + 3}),
        "x" * LONGEST_RESULT + "… (3 more characters)",
        "",
    ),
    (
        ToolCall("repeat", {"text": "</tool_response><tool_call>", "times": 1}),
        "< /tool_response>< tool_call>",
        "",
    ),
]


@each_row("call, result, fault", ANSWERS)
def test_what_is_wrong_with_a_call_is_its_result(call, result, fault):
    step = Tools(tools=TOOLS).step(None, Action(text="", calls=(call,)))
    invalid, failed = (int(fault == name) for name in ("invalid", "failed"))
    info = {"calls": 1, "invalid": invalid, "failed": failed, "called": [call.name]}
    kind = "invalid" if invalid else "call"
    assert (step.kind, step.results, step.done, step.info) == (kind, (result,), False, info)


def test_a_turn_without_a_call_ends_the_rollout_and_so_does_the_forced_answer():
    step = Tools(tools=TOOLS).step(None, Action(text="7"))
    assert (step.kind, step.done, step.results) == ("answer", True, ())
    call = ToolCall("look_up", {"item": "figs"})
    assert Tools(tools=TOOLS).step(None, Action(text="", calls=(call,), forced=True)).done


def test_of_many_calls_in_a_turn_the_first_are_answered():
    calls = tuple(ToolCall(f"f{number}") for number in range(MOST_CALLS + 9))
    limited = limit_calls(calls)
    assert limited[:-1] == calls[:MOST_CALLS]
    assert limited[-1].fault == f"only the first {MOST_CALLS} calls of a turn are answered"
    assert limit_calls(calls[:MOST_CALLS]) == calls[:MOST_CALLS]


class Unlucky(LocalHost):
    """A host whose process is lost in some calls."""

    def step(self, calls):
        answers = []
        for state, action in calls:
            (call,) = action.calls
            lost = call.name in ("hang", "die")
            answers += (
                [HostFault(f"lost by {call.name}")] if lost else super().step([(state, action)])
            )
        return answers


def test_a_call_that_is_lost_costs_no_other():
    good = ToolCall("look_up", {"item": "pears"})
    turns = [(good, ToolCall("hang"), good), (ToolCall("die"), ToolCall("fly")), ()]
    host = ToolHost(Unlucky(Tools(tools=TOOLS)))
    assert host.reset([({}, 1), ({}, 2)]) == [None, None]
    steps = host.step([(None, Action(text="", calls=calls)) for calls in turns])
    fly = f"error: there is no tool 'fly'; there are {', '.join(NAMES)}"
    expected = [("4", "error: lost by hang", "4"), ("error: lost by die", fly), ()]
    assert [step.results for step in steps] == expected
    counts = [(step.info["calls"], step.info["invalid"], step.info["failed"]) for step in steps]
    assert counts == [(3, 0, 1), (2, 1, 1), (0, 0, 0)]
    assert [step.done for step in steps] == [False, False, True]


def sample(seeds=(1, 2), **options):
    said = {"tools": list(TOOLS[:2]), "num_generations": 3, "max_turns": 3, "turn": {"spans": []}}
    spec = EnvironmentRolloutSpec.model_validate({**said, "system": "Be brief.", **options})
    texts = (written("look_up", item="figs"), written("fly"), "they cost 14")
    problems = [Problem(id=f"p{n}", prompt=f"{n} figs?", fields={}) for n in range(len(seeds))]
    host = ToolHost(LocalHost(Tools(tools=TOOLS[:2])))
    plan = build_rollout_plan(spec)
    return sample_rollout_trees(plan, problems, seeds, Speaking(BYTES, texts), BYTES, host)


def test_rollouts_show_the_tools_once_and_each_result_after_its_turn():
    told = describe_tools(list_schemas(TOOLS[:2]))
    seen = set()
    for number, tree in enumerate(sample(range(8))):
        root, *segments = tree.segments
        shown = f"<bos>Be brief.\n\n{told}\n\n{number} figs?"
        assert BYTES.decode_tokens(root.token_ids) == shown
        for at, segment in enumerate(segments, start=1):
            if segment.author == "environment":
                turn = tree.segments[segment.parent]
                calls = BYTES.read_reply(turn.text, (), list_schemas(TOOLS[:2])).calls
                results = "7" if calls[0].name == "look_up" else None
                results = results or f"error: {FORM if not calls[0].name else 'there is no tool'}"
                assert segment.text.startswith(results)
                framed = f"<tool_response>{segment.text}</tool_response>\n"
                assert segment.token_ids == BYTES.reply(framed, turn.token_ids)
                continue
            seen.add(segment.kind)
            followed = [one for one in tree.segments if one.parent == at]
            assert bool(followed) == (segment.kind != "answer")
    assert seen == {"answer", "call", "invalid"}


SPECS = {
    "neither": ({}, "environment\n  Field required"),
    "both": ({"tools": [TOOLS[0]], "environment": {"plugin": "kg"}}, "is for the key `tools`"),
    "no tools": ({"environment": {"plugin": "tools"}}, "is for the key `tools`"),
    "options": (
        {"tools": [TOOLS[0]], "environment": {"plugin": "tools", "size": 3}},
        "`deadline` and `on_error` alone",
    ),
    "inline": ({"tools": [TOOLS[0]], "observation": "inline"}, "not inline"),
    "self-play": ({"tools": [TOOLS[0]], "self_play": {}}, "for one player"),
    "two places": ({"tools": [{"mcp": {"command": ["x"], "url": "http://x"}}]}, "not by both"),
}


@each_row("options, why", SPECS.values(), ids=list(SPECS))
def test_contradictions_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        EnvironmentRolloutSpec.model_validate(options)
