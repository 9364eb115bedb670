"""Stop strings are found at the token that completes them, whatever the tokenizer."""

import pytest
from checkpoints import STYLES, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlx.model import PlainDialogue
from rlx.sampler.draw import StopStringDetector


def byte_level():
    return tokenizer(STYLES["words"])


def word_level():
    """Decoding drops the space before the first token of a text."""
    words = ["▁a", "▁b", "a", "b", "c", "▁", ">", "</"]
    pieces = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="c"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=pieces)


READS = {make.__name__: PlainDialogue(make(), [0]).read for make in (byte_level, word_level)}


def first_stop(read, stop, tokens):
    """How many tokens it takes until their text contains a stop string, by decoding every time."""
    return next(
        (n for n in range(1, len(tokens) + 1) if any(s in read(tokens[:n])[0] for s in stop)), None
    )


@pytest.mark.parametrize("name", READS)
@given(data=st.data())
@settings(max_examples=60)
def test_the_same_token_as_decoding_everything(name, data):
    read = READS[name]
    count = {"byte_level": 300, "word_level": 8}[name]
    tokens = data.draw(st.lists(st.integers(1, count - 1), min_size=2, max_size=16))
    text = read(tokens)[0]
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 4))] or "never"
    detector = StopStringDetector(read, (stop, "</answer>"))
    found = next((n for n in range(1, len(tokens) + 1) if detector.completes(tokens[:n])), None)
    assert found == first_stop(read, (stop, "</answer>"), tokens)
