"""What an environment says, as tokens: inline, as a message, without control tokens."""

import pytest
from checkpoints import STYLES, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from rlx.model import ChatDialogue, PlainDialogue
from rlx.model.tokenizer import tiny_tokenizer
from rlx.spec import TinyModelSpec

TINY = tiny_tokenizer(TinyModelSpec())
PLAIN = PlainDialogue(TINY, (TINY.eos_token_id,))
CHATS = {
    name: ChatDialogue(tok, (tok.eos_token_id,))
    for name, tok in ((name, tokenizer(style)) for name, style in STYLES.items())
}
CONTROL = {name: [t for t in style.specials if t] for name, style in STYLES.items()}


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


@pytest.mark.parametrize("name", CHATS)
def test_a_message_is_the_template_s_and_inline_is_the_text_alone(name):
    dialogue = CHATS[name]
    turn = (*dialogue.encode("<kg-query>x</kg-query>"), dialogue.end_ids[0])
    text = "<information> Paris </information>"
    assert dialogue.encode_observation(text, turn, inline=True).token_ids == dialogue.encode(text)
    shown = dialogue.encode_observation(text, turn, inline=False)
    assert shown.token_ids == dialogue.reply(text, turn)
    assert shown.text == text


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("name", CHATS)
@given(data=st.data())
def test_no_text_of_an_environment_becomes_a_control_token(name, inline, data):
    """It brings no control token with it beyond those that any other text would have around it."""
    dialogue, tok = CHATS[name], tokenizer(STYLES[name])
    pieces = st.sampled_from([*CONTROL[name], "<", ">", "|", " ", "a", "end", "system\n"])
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    turn = (*dialogue.encode("17"), dialogue.end_ids[0])
    shown = dialogue.encode_observation(text, turn, inline=inline)
    usual = dialogue.encode_observation("a", turn, inline=inline)
    special = set(tok.all_special_ids)
    assert [i for i in shown.token_ids if i in special] == [
        i for i in usual.token_ids if i in special
    ]
    assert not any(control in shown.text for control in CONTROL[name])


def test_text_without_control_tokens_is_shown_as_it_is():
    for dialogue in CHATS.values():
        text = "<information> A < B, <b>c</b> | d </information>"
        turn = (*dialogue.encode("17"), dialogue.end_ids[0])
        assert dialogue.encode_observation(text, turn, inline=True).text == text
