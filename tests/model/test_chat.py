"""Chat templates: what is said around the turns is the template's; the turns are left alone."""

from dataclasses import replace

import pytest
from checkpoints import STYLES, Style, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from rows import each_row

from rlx.errors import SpecError
from rlx.model import ChatDialogue
from rlx.plugin import Message

SYSTEM = "Say how sure you are."
CLOSING = sorted(name for name, style in STYLES.items() if style.closes)
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["rlxturn", "rlxturnn rlxturn", "<|im_end|>", "</s>", "[/INST]", "<think>", "{{ x }}", " \n"]
)


class Speaker:
    """A dialogue, and what the template itself makes of a whole one."""

    def __init__(self, style):
        self.style = style
        self.tokenizer = tokenizer(style)
        self.dialogue = ChatDialogue(self.tokenizer, (self.tokenizer.eos_token_id,))

    def whole(self, system, *said, tokenize=True):
        if system and not self.style.system:
            system, said = "", (f"{system}\n\n{said[0]}", *said[1:])
        roles = ("user", "assistant") * len(said)
        messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
        return self.tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, *messages] if system else messages,
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=False,
        )

    def turn(self, text, *, closed):
        """Tokens as the model may sample them, where its header leaves off."""
        spoken = f" {text}" if self.style is STYLES["brackets"] else text
        return (*self.dialogue.encode(spoken), *(self.dialogue.end_ids[:1] if closed else ()))


SPEAKERS = {name: Speaker(style) for name, style in STYLES.items()}


def template(text, *, closes="<end>"):
    """A speaker whose template shows the assistant's turns as `text`."""
    source = "{% for m in messages %}{% if m['role'] == 'assistant' %}" + text
    source += "{% else %}<in>{{ m['content'] }}<out>{% endif %}{% endfor %}"
    return Style(source, ("<in>", "<out>", "<end>", "<doc>"), closes)


@each_row("system", ["", SYSTEM])
@each_row("closed", [True, False])
@each_row("name", CLOSING)
def test_the_pieces_are_the_templates_own_whole(name, system, closed):
    speaker = SPEAKERS[name]
    said = ("nums: 3 17 20", "17 + 3 = 20", "sure?", "I am", "really?")
    first, second = (speaker.turn(text, closed=closed) for text in said[1::2])
    ids = (
        *speaker.dialogue.open(said[0], system),
        *first,
        *speaker.dialogue.reply(said[2], first),
        *second,
        *speaker.dialogue.reply(said[4], second),
    )
    assert list(ids) == speaker.whole(system, *said)


CONVERSATIONS = (
    ("nums: 3 17 20", "17 + 3 = 20", "sure?"),
    ("nums: 3", "<answer>3</answer>", "nums: 4", "<answer>4</answer>", "nums: 5"),
    ("one", "two", "three", "four", "five", "six", "seven"),
)


@pytest.mark.parametrize("name", SPEAKERS)
def test_earlier_messages_are_the_template_s(name):
    speaker = SPEAKERS[name]
    for system in ("", SYSTEM):
        for said in CONVERSATIONS:
            roles = ("user", "assistant") * len(said)
            history = [Message(r, c) for r, c in zip(roles, said[:-1], strict=False)]
            ids = speaker.dialogue.open(said[-1], system, history)
            assert list(ids) == speaker.whole(system, *said), (system, said)


@pytest.mark.parametrize("name", SPEAKERS)
def test_a_prefix_follows_the_header(name):
    dialogue, whole = SPEAKERS[name].dialogue, SPEAKERS[name].whole
    rendered = whole("", "nums: 3", tokenize=False) + "<answer>"
    assert dialogue.open("nums: 3", prefix="<answer>") == dialogue.encode(rendered)
    turn = dialogue.encode("17")
    usual = dialogue.reply("sure?", turn)
    assert dialogue.reply("sure?", turn, "It is") == (*usual, *dialogue.encode("It is"))


@pytest.mark.parametrize("name", CLOSING)
@given(first=TEXTS, second=TEXTS, closed=st.booleans())
def test_whatever_is_asked_stands_where_the_template_puts_it(name, first, second, closed):
    speaker = SPEAKERS[name]
    turn = speaker.turn("17", closed=closed)
    ids = (*speaker.dialogue.open(first), *turn, *speaker.dialogue.reply(second, turn))
    expected = speaker.whole("", first, "17", second, tokenize=False)
    assert speaker.tokenizer.decode(ids) == expected


@each_row("name", STYLES)
def test_a_turn_is_closed_exactly_once(name):
    style, dialogue = STYLES[name], SPEAKERS[name].dialogue
    unclosed = dialogue.reply("sure?", dialogue.encode("17"))
    assert unclosed[0] == dialogue.end_ids[0]
    assert dialogue.reply("sure?", ()) == unclosed
    for end in dialogue.end_ids:
        assert dialogue.reply("sure?", (*dialogue.encode("17"), end)) == unclosed[1:]
        assert dialogue.read((*dialogue.encode("17"), end)) == dialogue.read(
            (*dialogue.encode("17"), dialogue.end_ids[0])
        )
    ends = SPEAKERS[name].tokenizer.convert_ids_to_tokens(list(dialogue.end_ids))
    assert ends == list(dict.fromkeys(filter(None, (style.closes, style.specials[-1]))))


def test_an_end_that_opens_the_next_turn_is_not_said_twice():
    speaker = Speaker(template("{{ m['content'] }}", closes=""))
    (opener,) = speaker.dialogue.encode("<in>")
    dialogue = ChatDialogue(speaker.tokenizer, (*speaker.dialogue.end_ids, opener))
    rest = dialogue.encode("sure?<out>")
    assert dialogue.reply("sure?", (7, opener)) == rest
    assert dialogue.reply("sure?", (7, dialogue.end_ids[0])) == (opener, *rest)
    assert dialogue.reply("sure?", (7,)) == (opener, *rest)


def test_blanks_before_the_end_token_are_the_templates_own():
    dialogue = Speaker(template("{{ m['content'] + ' <end>' }}")).dialogue
    blank, end, *rest = dialogue.encode(" <end><in>sure?<out>")
    assert dialogue.end_ids[0] == end
    assert dialogue.reply("sure?", (7,)) == (blank, end, *rest)
    assert dialogue.reply("sure?", (7, end)) == tuple(rest)


@each_row(
    "text",
    [
        "{{ m['content'] | upper }}<end>",
        "<end>",
        "{{ m['content'] + m['content'] }}<end>",
        "{{ raise_exception('no answers please') }}",
    ],
)
def test_a_template_that_hides_the_turns_is_refused(text):
    with pytest.raises(SpecError, match=r"set model.chat_template: false to use plain text"):
        Speaker(template(text))


def test_a_trimmed_turn_is_found():
    dialogue = Speaker(template("{{ m['content'] | trim }}<end>")).dialogue
    assert dialogue.reply("sure?", ()) == dialogue.encode("<end><in>sure?<out>")


def test_a_template_that_writes_the_date_shows_the_same_prompt_every_day():
    source = "{% if strftime_now is defined %}<in>Today: {{ strftime_now('%d %b %Y') }}{% endif %}"
    style = template("{{ m['content'] }}<end>")
    dated = tokenizer(replace(style, template=source + style.template))
    dialogue = ChatDialogue(dated, (dated.eos_token_id,))
    said = dialogue.encode("<in>Today: 01 Jan 2025<in>nums: 3<out>")
    assert dialogue.open("nums: 3") == said
    assert dialogue.open_chat([{"role": "user", "content": "nums: 3"}]) == said
