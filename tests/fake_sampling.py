"""Peak memory of sampling, by meta tensors: shapes without numbers.

The model, its decoder, the session with its batches, and what a step makes of logits are the
sampler's own. Of the steps of a turn only the first and the last are taken: a batch has room for
its limit of tokens from its beginning. Before the last one, a quarter of the rows has ended.
"""

from functools import lru_cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
from fake_memory import LiveBytes, build_config
from transformers import Qwen2ForCausalLM

from rlx.rollout import Completion, CompletionRequest
from rlx.sampler import transformers_engine
from rlx.sampler.plain_decoder import PlainDecoder
from rlx.sampler.shared_cache import RowSuffixes
from rlx.sampler.shared_rows import SharingDecoder
from rlx.spec import TurnSpec

__all__ = ["measure_sampling"]

ENDED = 4
"""One of so many rows ends before the last step."""


class FakeLoop(transformers_engine._DecodingLoop):
    """The loop of a turn, whose rows end where this says."""

    def run(self, logits):
        count, limit = len(self._live), self._sampling.max_new_tokens
        token = self._draw(logits, 0)
        suffix = self._rows._suffix
        read = [n + max(0, limit - 2) for n in suffix.lengths]
        self._rows._suffix = RowSuffixes(suffix.keys, suffix.values, read)
        del suffix
        going = count - count // ENDED
        if going < count:
            token = self._drop([row < going for row in range(count)], token, max(0, limit - 2))
        if limit > 1:
            self._draw(self._rows.step(token), limit - 1)
        self._retire(range(len(self._live)), limit - 1)
        return [Completion((5,) * limit, (-1.0,) * limit, "length") for _ in range(count)]

    def _retire(self, which, step):
        if self._keeps:
            aside = self._rows.set_aside(which, [0] * len(which))
            for number, row in enumerate(which):
                self.places[self._live[row]] = (aside, number)


@lru_cache
def measure_sampling(shape, levels, max_rows, ranks):
    """Peak bytes beyond the weights while one rank samples, with all turns at their limit.

    Args:
        shape: a `ModelShape` of a Qwen2 model.
        levels: `LevelTokens`, first turn first.
        max_rows: rows decoded together.
        ranks: number of samplers.
    """
    counts = [max(1, round(level.turns / level.openings)) for level in levels]
    prompts = max(1, round(levels[0].openings / ranks))
    if len(levels) > 1:  # so many go through all turns together
        prompts = max(1, min(prompts, max_rows // counts[0]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = Qwen2ForCausalLM(build_config(shape)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    decoder = SharingDecoder(PlainDecoder(model), captures=False)
    decoders = SimpleNamespace(within=lambda: decoder, covers=lambda _: True)
    policy = SimpleNamespace(model=model, end_ids=(2,), context_length=1 << 20, dialogue=None)
    session = transformers_engine._TransformersSession(decoders, policy, max_rows)
    live = LiveBytes()
    for parameter in model.parameters():
        live.sizes[parameter.untyped_storage()._cdata] = 0
    with live, patch.object(transformers_engine, "_DecodingLoop", FakeLoop):
        sample_levels(session, levels, counts, prompts)
    return live.peak


def sample_levels(session, levels, counts, prompts):
    """All turns of some prompts."""
    contexts = [(None, (5,) * round(levels[0].opening)) for _ in range(prompts)]
    for number, (level, count) in enumerate(zip(levels, counts, strict=True)):
        is_last = number == len(levels) - 1
        requests = [
            CompletionRequest(context, extends, range(count), is_last=is_last)
            for extends, context in contexts
        ]
        drawn = session.generate(requests, TurnSpec(max_new_tokens=level.at_most))
        question = () if is_last else (7,) * max(1, round(levels[number + 1].opening))
        above = [context for _, context in contexts for _ in range(count)]
        flat = [completion for completions in drawn for completion in completions]
        contexts = [
            (n, context + completion.token_ids + question)
            for n, (context, completion) in enumerate(zip(above, flat, strict=True))
        ]
