"""Text to tokens and back: the shipped tokenizers, and a byte-level BPE trained here."""

from importlib.resources import files
from itertools import accumulate

import pytest
from checkpoints import train_bytewise
from hypothesis import given
from hypothesis import strategies as st
from rows import each_row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlx.errors import SpecError
from rlx.model import PlainDialogue, Vocabulary, build_policy, tiny_tokenizer
from rlx.plugin import Message
from rlx.rollout import find_spans
from rlx.spec import TinyModelSpec

SMALL = TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=32)
SHIPPED = sorted(f.name.removesuffix(".json") for f in files("rlx.model.tokenizers").iterdir())
EPISODES = {
    "arithmetic": [
        "nums: 3 17 20\ntarget: 99\n",
        "<think>17+3=20\n20*4=80\n</think><answer>(17+3)*4</answer>",
        "sure?\n",
        "<confidence>0.7</confidence>",
        "<analysis>20-3=17</analysis><confidence>10</confidence>",
        "<confidence>95%</confidence>",
    ],
    "arithmetic_05": [
        "nums: 3 17 20\ntarget: 99\n",
        "<think>17+3=20\n</think><answer>(17+3)*4</answer>",
        "<confidence>0.05</confidence>",
        "<analysis>20-3=17</analysis><confidence>0.95</confidence>",
    ],
    "world": [
        "name the capital of a country that borders Papua New Guinea ?\n",
        "<think> find borders of Niger</think>"
        "<kg-query>get_tail_entities( Niger, borders)</kg-query>",
        "<information> borders of Niger: Nigeria, Algeria, +3 more </information>",
        "<think> answer found</think><answer> .ng, .fr</answer>",
        "<information> error ENTITY_NOT_FOUND </information>",
    ],
}
WORDS = [(name, text) for name, texts in EPISODES.items() for text in texts]
STRANGE = {
    "arithmetic": ["é", "3 + x", "101", "<unk>"],
    "arithmetic_05": ["é", "3 + x", "101", "<unk>"],
    "world": ["é", " Atlantis", " Nigeri", "<unk>"],
}


@pytest.fixture(scope="module")
def policies():
    return {name: build_policy(SMALL.model_copy(update={"tokenizer": name}), 0) for name in SHIPPED}


@pytest.fixture(scope="module")
def policy(policies):
    return policies["arithmetic"]


@pytest.fixture(scope="module")
def tiny(policy):
    return policy.dialogue


@each_row(("name", "text"), WORDS)
def test_what_the_task_says_survives_the_tokenizer(policies, name, text):
    dialogue = policies[name].dialogue
    ids = dialogue.encode(text)
    assert dialogue.read(ids)[0] == text
    assert len(ids) < len(text)


def test_the_end_token_is_read_as_nothing(tiny):
    ids = (*tiny.encode("3+4"), tiny.end_ids[0])
    assert tiny.read(ids) == ("3+4", (1, 2, 3, 3))
    assert tiny.read(tiny.end_ids) == ("", (0,))
    assert tiny.read(()) == ("", ())


@each_row(("name", "text"), [(n, t) for n, ts in STRANGE.items() for t in ts])
def test_text_without_tokens_is_refused(policies, name, text):
    with pytest.raises(SpecError, match="no token for"):
        policies[name].dialogue.encode(text)


@pytest.mark.parametrize("begins", [True, False])
def test_plain_text_begins_as_the_tokenizer_s_own_call_begins_it(begins):
    """Having a BOS token is not using it."""
    vocabulary = Vocabulary.build_bytes()
    tokenizer = tiny_tokenizer(vocabulary)
    if not begins:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=vocabulary.tokenizer, **vocabulary.special
        )
    dialogue = PlainDialogue(tokenizer, (tokenizer.eos_token_id,))
    assert (tokenizer("hi").input_ids[0] == tokenizer.bos_token_id) == begins
    for text in ("hi", "", " two words\n", "é"):
        assert list(dialogue.open(text)) == tokenizer(text).input_ids


def test_a_tokenizer_whose_call_changes_the_text_is_refused(monkeypatch):
    vocabulary = Vocabulary.build_bytes()
    monkeypatch.setattr(
        Vocabulary, "encode", lambda _, text, *, add_special_tokens: [4 + add_special_tokens]
    )
    with pytest.raises(SpecError, match="own call changes the tokens of a text"):
        PlainDialogue(vocabulary, (0,))


def test_earlier_messages_are_turns_of_plain_text(tiny):
    end = tiny.end_ids[0]
    history = [Message("user", "3\n"), Message("assistant", "7")]
    expected = (*tiny.open("sure?\n\n3\n"), *tiny.encode("7"), end, *tiny.encode("4\n5"))
    assert tiny.open("4\n", "sure?", history, "5") == expected


def test_a_turn_is_closed_exactly_once(tiny, policy):
    question, (end,) = tiny.encode("sure?\n"), tiny.end_ids
    assert tiny.open("3") == (policy.tokenizer.bos_token_id, *tiny.encode("3"))
    assert tiny.reply("sure?\n", tiny.encode("3")) == (end, *question)
    assert tiny.reply("sure?\n", (*tiny.encode("3"), end)) == question
    assert tiny.reply("sure?\n", ()) == (end, *question)


@pytest.fixture(scope="module")
def bytewise():
    """Merges reach across tag borders (`r>7` is one token); é, € and 😀 are several tokens."""
    return train_bytewise(["r>7", "7</", "7 </"] * 50 + ["answer"] * 20)


def test_a_character_counts_from_the_token_that_completes_it(bytewise):
    ids = bytewise.encode("a€b")
    assert len(ids) == 5
    assert bytewise.read(ids) == ("a€b", (1, 1, 1, 2, 3))
    assert bytewise.read((*ids, *bytewise.end_ids)) == ("a€b", (1, 1, 1, 2, 3, 3))


@each_row("content", ["é", "€7", "7€", "😀😀", "7 ", "", "a\N{REPLACEMENT CHARACTER}b"])
@each_row("around", ["", "é", "😀 "])
def test_spans_hold_every_byte_of_their_text(bytewise, content, around):
    whole = f"{around}<answer>{content}</answer>{around}"
    ids = bytewise.encode(whole)
    text, ends = bytewise.read(ids)
    assert text == whole
    assert list(ends) == sorted(ends)
    assert ends[-1] == len(whole)
    (span,) = find_spans(text, ends, ["answer"]).values()
    assert span.text == content
    held = bytewise.read(ids[slice(*span.outer)])[0]
    assert held.startswith("<answer>")
    assert held.endswith("</answer>")
    assert content in bytewise.read(ids[slice(*span.inner)])[0]


@pytest.fixture(scope="module")
def spaced():
    """Words carry the space before them, and the text's first space is dropped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    trainer = trainers.BpeTrainer(
        special_tokens=["<unk>", "<eos>", *(f"<0x{n:02X}>" for n in range(256))],
        initial_alphabet=sorted("▁<>/answer7sure?"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["are you sure ? <answer> 7 </answer>"] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return PlainDialogue(fast, (fast.eos_token_id,))


def prefixes(dialogue, ids):
    """Lengths of every prefix, decoded; half a character never takes back the one before it."""
    texts = [dialogue.read(ids[: n + 1])[0] for n in range(len(ids))]
    return tuple(accumulate((len(t.rstrip("\N{REPLACEMENT CHARACTER}")) for t in texts), max))


@given(text=st.text(alphabet="<>/answer7 ué€😀", max_size=30))
def test_every_prefix_has_the_length_it_decodes_to(spaced, bytewise, text):
    for dialogue in (spaced, bytewise):
        ids = dialogue.encode(text)
        assert dialogue.read(ids)[1] == prefixes(dialogue, ids)
