"""A spoiled sentence keeps the tokens that were sampled, but for those that the change touches."""

from itertools import accumulate

import hypothesis.strategies as st
from hypothesis import given

from rlx.errors import SpecError
from rlx.probe.questions import Reasoning, _encode_corrupted_sentence

WORDS = ("15", "*", "1", ".", "6", "=", "90", "\n", "7", "+", "3", "10")


class Words:
    """Writes words of a small vocabulary, and no decimals, as the shipped tokenizer does."""

    def encode(self, text):
        ids, at = [], 0
        while at < len(text):
            fitting = [w for w in WORDS if text.startswith(w, at)]
            if not fitting or "." in text:
                raise SpecError(f"no token for {text[at:]!r}")
            word = max(fitting, key=len)
            ids.append(WORDS.index(word))
            at += len(word)
        return tuple(ids)


def reasoning(*words):
    ids = tuple(WORDS.index(w) for w in words)
    return Reasoning(
        start=0, token_ids=ids, text="".join(words), ends=tuple(accumulate(map(len, words)))
    )


def test_only_what_changes_is_written_anew():
    said = reasoning("15", "*", "1", ".", "6", "=", "90", "\n")
    # The whole sentence could not be written again: 1.6 is no word of this vocabulary.
    spoiled = _encode_corrupted_sentence(said, 0, 8, "15*1.6=10\n", Words())
    assert spoiled == (*said.token_ids[:6], WORDS.index("10"), said.token_ids[7])


def test_what_the_vocabulary_cannot_write_is_left_alone():
    said = reasoning("7", "+", "3", "=", "10", "\n")
    assert _encode_corrupted_sentence(said, 0, 6, "7+3=88\n", Words()) is None


@given(
    words=st.lists(st.sampled_from([w for w in WORDS if w != "."]), min_size=1, max_size=9),
    data=st.data(),
)
def test_it_says_what_it_should(words, data):
    said = reasoning(*words)
    first = data.draw(st.integers(0, len(words) - 1))
    stop = data.draw(st.integers(first + 1, len(words)))
    other = [w for w in WORDS if w != "."]
    wrong = "".join(data.draw(st.lists(st.sampled_from(other), max_size=6)))
    spoiled = _encode_corrupted_sentence(said, first, stop, wrong, Words())
    # A change that ends inside a word cannot be written in these words.
    if spoiled is not None:
        assert "".join(WORDS[i] for i in spoiled) == wrong
