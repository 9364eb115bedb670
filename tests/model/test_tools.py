"""Tools through chat templates: the tokens are those of the template itself, or it is refused.

The templates are our own, in the manner of the families that they are named after.
"""

import pytest
from checkpoints import Style, tokenizer
from rows import each_row

from rlx.errors import SpecError
from rlx.model import ChatDialogue
from rlx.model.tokenizer import build_vocabulary_dialogue
from rlx.model.vocabulary import Vocabulary
from rlx.plugin import Problem, ToolCall
from rlx.rollout import encode_opening, list_schemas

TOOLS = list_schemas(["tool_examples:look_up", "tool_examples:add_up"])
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|doc_end|>")
TOLD = (
    "{%- if tools -%}{{ '<|im_start|>system\n' }}{%- for t in tools -%}{{ t | tojson + '\n' }}"
    "{%- endfor -%}{{ '<|im_end|>\n' }}{%- endif -%}"
)
RESULTS = (
    "{%- elif m['role'] == 'tool' -%}"
    "{%- if loop.previtem['role'] != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}"
    "{{ '\n<result>\n' + m['content'] + '\n</result>' }}"
    "{%- if loop.last or loop.nextitem['role'] != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}"
)


def template(called, told=TOLD, results=RESULTS):
    """A template that writes a call as `called`."""
    return (
        told + "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
        "{{ '<|im_start|>assistant\n' + m['content'] }}{%- for c in m['tool_calls'] -%}"
        "{%- set f = c['function'] -%}"
        + called
        + "{%- endfor -%}{{ '<|im_end|>\n' }}"
        + results
        + "{%- else -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        "{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )


IN_JSON = (
    "{{ '<tool_call>\n{\"name\": \"' + f['name'] + '\", \"arguments\": ' + f['arguments'] | tojson"
    " + '}\n</tool_call>' }}"
)
IN_TAGS = (
    "{{ '<tool_call>\n<function=' + f['name'] + '>\n' }}{%- for k, v in f['arguments'] | items -%}"
    "{{ '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{%- endfor -%}"
    "{{ '</function>\n</tool_call>' }}"
)
BARE = "{{ '{\"name\": \"' + f['name'] + '\", \"parameters\": ' + f['arguments'] | tojson + '}' }}"
WORKING = {"json": template(IN_JSON), "tags": template(IN_TAGS), "bare": template(BARE)}


def speaker(source):
    speaks = tokenizer(Style(source, SPECIALS, "<|im_end|>"))
    return speaks, ChatDialogue(speaks, (speaks.eos_token_id,))


@each_row("source", WORKING.values(), ids=list(WORKING))
def test_schemas_calls_and_results_are_the_tokens_of_the_template(source):
    speaks, dialogue = speaker(source)
    dialogue.check_tools(TOOLS)
    opening = encode_opening(
        dialogue, "{prompt}", Problem(id="p", prompt="figs?", fields={}), tools=TOOLS
    )
    call = ToolCall("look_up", {"item": "figs"})
    text = dialogue.write_call(call)
    assert dialogue.read_reply(text, opening.token_ids, TOOLS).calls == (call,)
    turn = (*dialogue.encode(text), *dialogue.end_ids[:1])
    results = [(call, "7"), (ToolCall("fly"), "error")]
    after = dialogue.encode_results(results, "so?", turn, TOOLS)
    assert after.text == "7\nerror\nso?"
    function = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages = [
        {"role": "user", "content": "figs?"},
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "error"},
        {"role": "user", "content": "so?"},
    ]
    whole = speaks.apply_chat_template(
        messages, tools=list(TOOLS), add_generation_prompt=True, return_dict=False
    )
    assert [*opening.token_ids, *turn, *after.token_ids] == whole
    cut = dialogue.encode_results(results, "so?", turn[:-1], TOOLS)  # out of tokens
    assert cut.token_ids == (*dialogue.end_ids[:1], *after.token_ids)


def test_names_of_control_tokens_in_results_are_broken_up():
    speaks, dialogue = speaker(WORKING["json"])
    after = dialogue.encode_results([(ToolCall("f"), "<|im_end|>!")], "", (), TOOLS)
    assert after.text == "< |im_end|>!"
    ends = speaks.convert_tokens_to_ids("<|im_end|>")
    assert after.token_ids.count(ends) == 2  # of the turn, and of the results


REFUSED = {
    "no tools": (template(IN_JSON, told=""), "does not write tools"),
    "no results": (template(IN_JSON, results=""), None),
    "results left out": (
        template(IN_JSON, results="{%- elif m['role'] == 'tool' -%}"),
        "does not write results of tools",
    ),
    "no calls": (template(""), "does not write calls of tools"),
    "calls of its own": (
        template("{{ '[' + f['name'] + '(item=' + f['arguments']['item'] + ')]' }}"),
        "only a tokenizer with a response_template reads",
    ),
}


@each_row("source, why", REFUSED.values(), ids=list(REFUSED))
def test_a_template_that_cannot_be_used_is_refused_with_what_to_do(source, why):
    _, dialogue = speaker(source)
    if why is None:  # it writes the role as it is
        dialogue.check_tools(TOOLS)
        return
    with pytest.raises(SpecError, match=why) as refused:
        dialogue.check_tools(TOOLS)
    assert "set model.chat_template: false" in str(refused.value)


def test_plain_text_names_the_tools_and_frames_the_results():
    dialogue = build_vocabulary_dialogue(Vocabulary.build_bytes())
    dialogue.check_tools(TOOLS)
    call = ToolCall("look_up", {"item": "figs"})
    text = dialogue.write_call(call)
    assert text == '<tool_call>{"name": "look_up", "arguments": {"item": "figs"}}</tool_call>'
    assert dialogue.read_reply(text, (), TOOLS).calls == (call,)
    shown = dialogue.encode_results([(call, "7"), (call, "8")], "so?", dialogue.end_ids, TOOLS)
    framed = "<tool_response>7</tool_response>\n<tool_response>8</tool_response>\nso?"
    assert shown.token_ids == dialogue.encode(framed)
