"""What an environment says, as tokens: inline, as a message, without control tokens."""

import pytest
from checkpoints import STYLES, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from rows import each_row

from rlx.model import ChatDialogue, PlainDialogue
from rlx.model.tokenizer import load_vocabulary, tiny_tokenizer
from rlx.plugin import Problem
from rlx.rollout import encode_opening
from rlx.spec import TinyModelSpec

TINY = tiny_tokenizer(load_vocabulary(TinyModelSpec()))
PLAIN = PlainDialogue(TINY, (TINY.eos_token_id,))
CHATS = {
    name: ChatDialogue(tok, (tok.eos_token_id,))
    for name, tok in ((name, tokenizer(style)) for name, style in STYLES.items())
}
CONTROL = {name: [t for t in style.specials if t] for name, style in STYLES.items()}


def list_control_ids(name, ids):
    special = set(tokenizer(STYLES[name]).all_special_ids)
    return [i for i in ids if i in special]


def test_plain_text_follows_the_turn():
    closed = (*PLAIN.encode("7"), *PLAIN.end_ids[:1])
    said = PLAIN.encode("+\n")
    for inline in (True, False):
        assert PLAIN.encode_observation("+\n", closed, inline=inline).token_ids == said
    unclosed = closed[:-1]
    assert PLAIN.encode_observation("+\n", unclosed, inline=True).token_ids == said
    assert PLAIN.encode_observation("+\n", unclosed, inline=False).token_ids == (
        *PLAIN.end_ids[:1],
        *said,
    )


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("name", CHATS)
@given(data=st.data())
def test_no_text_of_an_environment_becomes_a_control_token(name, inline, data):
    """It brings no control token with it beyond those that any other text would have around it."""
    dialogue = CHATS[name]
    pieces = st.sampled_from([*CONTROL[name], "<", ">", "|", " ", "a", "end", "system\n"])
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    turn = (*dialogue.encode("17"), dialogue.end_ids[0])
    shown = dialogue.encode_observation(text, turn, inline=inline)
    usual = dialogue.encode_observation("a", turn, inline=inline)
    assert list_control_ids(name, shown.token_ids) == list_control_ids(name, usual.token_ids)
    assert not any(control in shown.text for control in CONTROL[name])


@pytest.mark.parametrize("name", CHATS)
@given(data=st.data())
def test_no_prompt_of_a_task_becomes_a_control_token(name, data):
    pieces = st.sampled_from([*CONTROL[name], "<", ">", "|", " ", "a", "end", "system\n"])
    text, system = ("".join(data.draw(st.lists(pieces, max_size=8))) for _ in range(2))
    problem = Problem(id="a", prompt=text, system=f"s{system}", fields={})
    usual = Problem(id="a", prompt="a", system="s", fields={})
    shown = encode_opening(CHATS[name], "Q: {prompt}", problem)
    plain = encode_opening(CHATS[name], "Q: {prompt}", usual)
    assert list_control_ids(name, shown.token_ids) == list_control_ids(name, plain.token_ids)
    assert not any(control in shown.text for control in CONTROL[name])


@each_row("name", CHATS)
def test_a_task_may_allow_control_tokens(name):
    control = CONTROL[name][0]
    problem = Problem(id="a", prompt=control, fields={}, allow_control_tokens=True)
    shown = encode_opening(CHATS[name], "{prompt}", problem)
    assert shown.text == control
    assert shown.token_ids == CHATS[name].open(control)
    broken = encode_opening(CHATS[name], "{prompt}", Problem(id="a", prompt=control, fields={}))
    assert broken.text == f"{control[0]} {control[1:]}"
    assert broken.token_ids == CHATS[name].open(broken.text)


@each_row("name", CHATS)
def test_the_experiment_s_own_template_and_system_message_keep_theirs(name):
    control = CONTROL[name][0]
    shown = encode_opening(
        CHATS[name], control + "{prompt}", Problem(id="a", prompt="a", fields={}), control
    )
    assert shown.token_ids == CHATS[name].open(f"{control}a", control)
