"""A dialogue of characters and a sampler that is a hash, for rollouts without a model."""

import hashlib

from rlx.rollout import Completion, TurnPrompt

BEGIN, END = 1, 0


class Characters:
    """A `Dialogue`, and a `Speech` of probes, whose tokens are characters."""

    def open(self, text, system="", history=(), prefix="", tools=()):
        said = "".join(message.content for message in history)
        return (BEGIN, *map(ord, system + said + text + prefix))

    def reply(self, text, after, prefix=""):
        return (*(() if after[-1] == END else (END,)), *self.encode(text + prefix))

    def encode(self, text):
        return tuple(map(ord, text))

    def read(self, token_ids):
        text = "".join(map(chr, token_ids)).removesuffix(chr(END))
        return text, tuple(min(n, len(text)) for n in range(1, len(token_ids) + 1))

    def break_control_tokens(self, text):
        return text

    def encode_observation(self, text, after, *, inline, prefix=""):
        ids = self.encode(text + prefix) if inline else self.reply(text, after, prefix)
        return TurnPrompt(text, ids)


class Hashing:
    """A `Session` that answers from the context and the seed alone, and remembers requests.

    Args:
        texts: what it may say; every fourth time it is cut short.
        context_length: tokens that it can hold.
    """

    def __init__(self, texts, context_length=100_000):
        self.said, self.context_length = texts, context_length
        self.calls = []

    def texts(self, sampling):
        return self.said

    def generate(self, requests, sampling):
        self.calls.append((list(requests), sampling))
        return [
            tuple(self.complete(request.context, seed, sampling) for seed in request.seeds)
            for request in requests
        ]

    def complete(self, context, seed, sampling):
        digest = hashlib.sha256(repr((context, seed)).encode()).digest()
        texts = self.texts(sampling)
        text = texts[digest[0] % len(texts)]
        if digest[1] % 4 == 0:
            return Completion(*self.tokens(text[:-2]), "length")
        return Completion(*self.tokens(text + chr(END)), "stop")

    def tokens(self, text):
        return tuple(map(ord, text)), tuple(-n / 8 for n in range(len(text)))


class Speaking(Hashing):
    """Answers in a dialogue's tokens."""

    def __init__(self, dialogue, texts, context_length=100_000):
        super().__init__(texts, context_length)
        self.dialogue = dialogue

    def tokens(self, text):
        end = self.dialogue.end_ids[:1] if text.endswith("\0") else ()
        ids = (*self.dialogue.encode(text.removesuffix("\0")), *end)
        return ids, tuple(-n / 8 for n in range(len(ids)))
