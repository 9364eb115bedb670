"""Sampling with the model's own transformers implementation.

Contexts are read once and their caches forked into the completions asked for; rows that have
finished leave the batch; completions that are continued keep their cache until the session ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlx.errors import SpecError
from rlx.model import Policy
from rlx.rollout import Completion, Request
from rlx.sampler.cache import Cache, CachedRows
from rlx.sampler.draw import draw, logprobs_of, uniforms
from rlx.spec import TurnSpec

__all__ = ["TransformersSampler"]

COMPACT_BELOW = 0.75
"""Finished rows are dropped once fewer than this share of the rows is still being decoded."""


class TransformersSampler:
    """Samples completions; holds its own copy of the weights.

    Args:
        policy: model and tokenizer; the model is used as it is and must not be sharded.
        max_rows: completions decoded together.
        device: where to sample.
    """

    def __init__(self, policy: Policy, *, max_rows: int, device: torch.device) -> None:
        self._policy = policy
        self._model = policy.model.to(device).eval()
        self._max_rows = max_rows
        self._device = device

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies in the learner's weights, by name; tied weights may be named once or twice."""
        own = dict(self._model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)

    @contextmanager
    def session(self) -> Iterator["_Session"]:
        """Opens a session; its caches are dropped when it closes."""
        session = _Session(self._model, self._policy, self._max_rows, self._device)
        try:
            yield session
        finally:
            session.close()


@dataclass(frozen=True, slots=True)
class _Decoded:
    """What a batch of rows became: the completions, and where the cache of each is kept."""

    completions: list[Completion]
    caches: list[tuple[Cache, int]]


class _Session:
    def __init__(
        self, model: PreTrainedModel, policy: Policy, max_rows: int, device: torch.device
    ) -> None:
        self._model = model
        self._policy = policy
        self._max_rows = max_rows
        self._device = device
        self._kept = CachedRows()

    def close(self) -> None:
        self._kept = CachedRows()

    @property
    def longest(self) -> int:
        """See `rlx.rollout.Session`."""
        return self._policy.longest

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """One completion per seed of every request. See `rlx.rollout.Session`.

        Raises:
            SpecError: a dialogue could outgrow the model.
        """
        self._require_room(requests, sampling)
        kept = CachedRows()
        completions: list[Completion] = []
        for part in self._parts(requests):
            decoded = self._decode(part, sampling)
            completions += decoded.completions
            kept.add(decoded.caches)
        self._kept = kept
        ready = iter(completions)
        return [tuple(next(ready) for _ in request.seeds) for request in requests]

    def _require_room(self, requests: Sequence[Request], sampling: TurnSpec) -> None:
        longest = max((len(request.context) for request in requests), default=0)
        if longest + sampling.max_new_tokens > self._policy.longest:
            raise SpecError(
                f"a dialogue of {longest} tokens and max_new_tokens {sampling.max_new_tokens} more "
                f"do not fit into this model, which holds {self._policy.longest}: lower "
                "max_new_tokens, or shorten prompts"
            )

    def _parts(self, requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
        """Runs of requests that together ask for at most `max_rows` completions."""
        part: list[Request] = []
        rows = 0
        for request in requests:
            if part and rows + len(request.seeds) > self._max_rows:
                yield part
                part, rows = [], 0
            part.append(request)
            rows += len(request.seeds)
        if part:
            yield part

    def _decode(self, requests: Sequence[Request], sampling: TurnSpec) -> _Decoded:
        cache, logits = self._read(requests)
        copies = torch.tensor(
            [i for i, request in enumerate(requests) for _ in request.seeds], device=self._device
        )
        cache, logits = cache.select(copies), logits.index_select(0, copies)
        seeds = [seed for request in requests for seed in request.seeds]
        noise = uniforms(seeds, sampling.max_new_tokens).to(self._device)
        return _Decoding(self._model, self._policy, cache, sampling).run(logits, noise)

    def _read(self, requests: Sequence[Request]) -> tuple[Cache, Tensor]:
        """Reads each context, or what its cache does not hold yet, and gives the next logits."""
        known = None
        extended = [r.extends for r in requests if r.extends is not None]
        if len(extended) == len(requests):
            known = self._kept.take(extended)
        seen = [0] * len(requests) if known is None else known.is_token.sum(dim=1).tolist()
        fresh = [r.context[n:] for r, n in zip(requests, seen, strict=True)]
        width = max(map(len, fresh))
        ids = torch.zeros(len(fresh), width, dtype=torch.int64)
        is_new = torch.zeros(len(fresh), width, dtype=torch.bool)
        for row, tokens in enumerate(fresh):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            is_new[row, width - len(tokens) :] = True
        ids, is_new = ids.to(self._device), is_new.to(self._device)
        past = None if known is None else known.is_token
        is_token = is_new if past is None else torch.cat([past, is_new], dim=1)
        positions = (is_token.cumsum(dim=1) - 1)[:, -width:].clamp(min=0)
        cache = DynamicCache() if known is None else known.growing(width)
        logits = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=_causal(is_token, width),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return Cache.of(cache, is_token), logits


def _causal(is_token: Tensor, new: int) -> Tensor:
    """`[R, 1, new, L]` bool: which columns each of the last `new` columns may look at.

    A padding column looks at itself, since a softmax over nothing is NaN.
    """
    length = is_token.shape[1]
    column = torch.arange(length, device=is_token.device)
    row = column[-new:, None]
    return ((column <= row) & is_token[:, None, :] | (column == row))[:, None]


class _Decoding:
    """Decodes rows one token at a time until each has ended."""

    def __init__(
        self, model: PreTrainedModel, policy: Policy, cache: Cache, sampling: TurnSpec
    ) -> None:
        self._model = model
        self._policy = policy
        self._sampling = sampling
        self._ends = torch.tensor(policy.end_ids, device=cache.is_token.device)
        self._start = cache
        self._tokens: list[list[int]] = [[] for _ in range(len(cache.is_token))]
        self._logprobs: list[list[float]] = [[] for _ in range(len(cache.is_token))]
        self._reasons = ["length"] * len(cache.is_token)
        self._caches: list[tuple[Cache, int]] = [(cache, 0)] * len(cache.is_token)

    def run(self, logits: Tensor, noise: Tensor) -> _Decoded:
        limit = self._sampling.max_new_tokens
        live = torch.arange(len(noise), device=noise.device)
        cache, is_token = self._start.growing(limit), self._start.is_token
        positions = is_token.sum(dim=1)
        running = torch.ones(len(live), dtype=torch.bool, device=noise.device)
        for step in range(limit):
            logprobs = logprobs_of(logits, self._sampling)
            token = draw(logprobs, noise[live, step])
            chosen = logprobs.gather(1, token[:, None])[:, 0]
            ended = self._record(live, running, token, chosen)
            running = running & ~ended
            if not running.any() or step == limit - 1:
                break
            if running.float().mean() < COMPACT_BELOW:
                frozen = Cache.of(cache, is_token)
                self._retire(frozen, live, ~running)
                keep = running.nonzero()[:, 0]
                kept = frozen.select(keep)
                cache, is_token = kept.growing(limit - step), kept.is_token
                live, token, positions = live[keep], token[keep], positions[keep]
                running = running[keep]
            is_token = torch.cat([is_token, running[:, None]], dim=1)
            logits = self._model(
                input_ids=token[:, None],
                position_ids=positions[:, None],
                attention_mask=_causal(is_token, 1),
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
            positions = positions + running
        self._retire(Cache.of(cache, is_token), live, torch.ones_like(running))
        completions = [
            Completion(tuple(t), tuple(p), "stop" if r == "stop" else "length")
            for t, p, r in zip(self._tokens, self._logprobs, self._reasons, strict=True)
        ]
        return _Decoded(completions, self._caches)

    def _record(self, live: Tensor, running: Tensor, token: Tensor, chosen: Tensor) -> Tensor:
        """Keeps each running row's token, and says which rows have ended with it, `[R]` bool."""
        ended = torch.isin(token, self._ends)
        for i, (row, runs, t, p) in enumerate(
            zip(live.tolist(), running.tolist(), token.tolist(), chosen.tolist(), strict=True)
        ):
            if not runs:
                continue
            self._tokens[row].append(t)
            self._logprobs[row].append(p)
            if self._sampling.stop and not ended[i]:
                ended[i] = self._stops(self._tokens[row])
        for row in live[ended & running].tolist():
            self._reasons[row] = "stop"
        return ended

    def _stops(self, tokens: list[int]) -> bool:
        longest = max(len(stop.encode()) for stop in self._sampling.stop)  # a token may be a byte
        text, _ = self._policy.dialogue.read(tokens[-longest - 4 :])
        return any(stop in text for stop in self._sampling.stop)

    def _retire(self, cache: Cache, live: Tensor, which: Tensor) -> None:
        """Sets the caches of finished rows aside."""
        rows = which.nonzero()[:, 0]
        aside = cache.select(rows)
        for number, row in enumerate(live[rows].tolist()):
            self._caches[row] = (aside, number)
