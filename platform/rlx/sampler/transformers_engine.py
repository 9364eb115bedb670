"""Samples completions with a transformers model.

Each distinct context is read once and forked into its completions, and what all contexts begin with
is read once for all of them. Finished rows leave the batch. The KV cache of a completion is kept
until the session's next call, if that may continue it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.errors import SpecError
from rlx.model import Policy
from rlx.rollout import Completion, CompletionRequest, count_shared
from rlx.sampler.decoders import Decoder, DialogueRows, choose_decoder
from rlx.sampler.draw import (
    StopStringDetector,
    compute_sampling_logprobs,
    require_context_room,
    require_finite_logits,
    sample_tokens,
    sample_uniforms,
)
from rlx.sampler.engine import (
    SamplingEngine,
    SequenceLogprobs,
    copy_policy,
)
from rlx.spec import RunnerSpec, TransformersSamplerSpec, TurnSpec

LOOK_EVERY = 4
"""Steps between checks for finished rows, each of which synchronizes with the device. Tokens
sampled after a row has finished are discarded."""

MOST_LOGITS = 2**27
"""Logits that are computed together for given tokens: half a gigabyte in float32."""


def give_memory_back(device: torch.device) -> None:
    """Empties PyTorch's cache of a GPU's memory, so that what comes next gets it in one piece."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def open_transformers(
    policy: Policy, spec: TransformersSamplerSpec, runner: RunnerSpec, device: torch.device
) -> Iterator["TransformersSampler"]:
    """See `rlx.sampler.open_sampler`."""
    own = copy_policy(policy, getattr(torch, runner.dtype), device)
    yield TransformersSampler(own, max_rows=spec.max_rows, device=device)


class TransformersSampler(SamplingEngine):
    """Samples completions, at most `max_rows` together; owns its own copy of the weights.

    The model must not be sharded, and the memory layout of its weights may change.
    """

    def __init__(self, policy: Policy, *, max_rows: int, device: torch.device) -> None:
        self._policy = policy
        self._model = policy.model.to(device).eval()
        self._max_rows = max_rows
        self._build_decoder = choose_decoder(self._model)
        self.description = self._build_decoder().description

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.load_each(iter(weights.items()))

    def load_each(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copies the learner's weights as they come."""
        own = dict(self._model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, weight in weights:
                own[name].copy_(weight)

    @torch.inference_mode()
    def compute_logprobs(
        self, sequences: Sequence[Sequence[int]], top: int
    ) -> list[SequenceLogprobs]:
        length, limit = max(map(len, sequences), default=0), self._policy.context_length
        if length > limit:
            raise SpecError(
                f"log-probabilities of {length} tokens do not fit into this engine's limit of "
                f"{limit}: shorten the text"
            )
        found: dict[int, SequenceLogprobs] = {}
        for batch in _split_by_logits(sequences, self._model.get_input_embeddings().num_embeddings):
            longest = max(len(sequences[number]) for number in batch)
            # What stands behind a causal model's token does not change its logits.
            padded = [[*sequences[n], *[0] * (longest - len(sequences[n]))] for n in batch]
            read = torch.tensor(padded, device=self._model.device)
            logits = self._model(input_ids=read, use_cache=False).logits
            for row, number in enumerate(batch):
                ids, before = sequences[number], logits[row, : len(sequences[number]) - 1].float()
                norm = before.logsumexp(dim=-1, keepdim=True)
                own = torch.tensor(ids[1:], device=before.device)[:, None]
                chosen = (before.gather(1, own) - norm)[:, 0].tolist()
                best = before.topk(top, dim=-1)
                pairs = zip(best.indices.tolist(), (best.values - norm).tolist(), strict=True)
                likeliest = tuple(tuple(zip(*pair, strict=True)) for pair in pairs)
                found[number] = SequenceLogprobs(tuple(chosen), likeliest)
        require_finite_logits(found[number].logprobs for number in found)
        return [found[number] for number in range(len(sequences))]

    def release(self) -> None:
        give_memory_back(self._model.device)

    @contextmanager
    def session(self) -> Iterator["_TransformersSession"]:
        """Opens a session; its caches are dropped when it closes."""
        self.release()
        session = _TransformersSession(
            self._build_decoder(), self._policy, self._max_rows, self.on_ended
        )
        try:
            yield session
        finally:
            session.close()


def _split_by_logits(sequences: Sequence[Sequence[int]], vocabulary: int) -> Iterator[list[int]]:
    """Yields the numbers of sequences, by length, in batches whose padded logits number at most
    `MOST_LOGITS`."""
    batch: list[int] = []
    for number in sorted(range(len(sequences)), key=lambda n: len(sequences[n])):
        if batch and (len(batch) + 1) * len(sequences[number]) * vocabulary > MOST_LOGITS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _CompletionBatch:
    """Completions that are decoded together.

    Attributes:
        contexts: distinct contexts, each with the completion that it extends; each is read once.
        copies: index of each completion's context.
        abandoned: says of each completion whether it is still waited for; None if it always is.
    """

    contexts: list[tuple[int | None, tuple[int, ...]]]
    copies: list[int]
    seeds: list[int]
    limits: list[int]
    abandoned: list[Callable[[], bool] | None]

    @staticmethod
    def from_requests(
        requests: Sequence[CompletionRequest], sampling: TurnSpec, *, extends: bool
    ) -> "_CompletionBatch":
        """Builds a batch; if `extends` is False, the requests' `extends` is ignored."""
        numbers: dict[tuple[int | None, tuple[int, ...]], int] = {}
        copies: list[int] = []
        seeds: list[int] = []
        limits: list[int] = []
        abandoned: list[Callable[[], bool] | None] = []
        for request in requests:
            context = (request.extends if extends else None, request.context)
            copies += [numbers.setdefault(context, len(numbers))] * len(request.seeds)
            seeds += request.seeds
            limits += [request.limit_tokens(sampling)] * len(request.seeds)
            abandoned += [request.is_abandoned] * len(request.seeds)
        return _CompletionBatch(list(numbers), copies, seeds, limits, abandoned)

    @property
    def extended(self) -> list[int]:
        return [number for number, _ in self.contexts if number is not None]


class _KeptCompletion(NamedTuple):
    """The batch and row that hold the KV cache of a finished completion, and its tokens read so
    far."""

    rows: DialogueRows
    row: int
    read: int


class _TransformersSession:
    def __init__(
        self,
        decoder: Decoder,
        policy: Policy,
        max_rows: int,
        on_ended: Callable[[int], None] | None,
    ) -> None:
        self._decoder, self._on_ended = decoder, on_ended
        self._policy, self._max_rows = policy, max_rows
        self._kept: list[_KeptCompletion | None] = []

    def close(self) -> None:
        self._kept = []

    @property
    def context_length(self) -> int:
        return self._policy.context_length

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """See `rlx.rollout.SamplingSession`. Raises SpecError if a dialogue could outgrow the
        model."""
        require_context_room(requests, sampling, self.context_length)
        give_memory_back(self._policy.model.device)
        extends = all(request.extends is not None for request in requests)
        batches = [
            _CompletionBatch.from_requests(part, sampling, extends=extends)
            for part in self._parts(requests)
        ]
        # The same for all batches, since rows may be joined later.
        forks = any(batch.copies != list(range(len(batch.contexts))) for batch in batches)
        keeps = not all(request.is_last for request in requests)
        kept: list[_KeptCompletion | None] = []
        completions: list[Completion] = []
        for number, batch in enumerate(batches):
            later = {n for later in batches[number + 1 :] for n in later.extended}
            self._retain(later | {*batch.extended})
            sampled, places = self._sample_batch(batch, sampling, later, forks, keeps)
            completions += sampled
            if not keeps:
                continue
            before = [len(batch.contexts[copy][1]) - 1 for copy in batch.copies]
            for (rows, row), n, completion in zip(places, before, sampled, strict=True):
                kept.append(_KeptCompletion(rows, row, n + len(completion.token_ids)))
        self._kept = kept
        ready = iter(completions)
        return [tuple(next(ready) for _ in request.seeds) for request in requests]

    def _sample_batch(
        self, batch: _CompletionBatch, sampling: TurnSpec, later: set[int], forks: bool, keeps: bool
    ) -> tuple[list[Completion], list[tuple[DialogueRows, int]]]:
        """Samples the completions of one batch; returns them and where their caches are kept.

        All caches but those that `later` batches extend are dropped as soon as this one has copied
        what it extends.
        """
        longest = max(batch.limits)
        rows, logits = self._read_contexts(batch, forks, longest)
        self._retain(later)
        noise = sample_uniforms(batch.seeds, longest).to(logits.device)
        decoding = _DecodingLoop(
            self._policy, sampling, rows, noise, batch, self._on_ended, keeps=keeps
        )
        del rows  # so that rows that leave the batch free their memory
        sampled = decoding.run(logits)
        return sampled, [decoding.places[number] for number in range(len(sampled) * keeps)]

    def _retain(self, numbers: Collection[int]) -> None:
        """Drops all completions but these, in order to free their memory."""
        self._kept = [kept if n in numbers else None for n, kept in enumerate(self._kept)]

    def _parts(
        self, requests: Sequence[CompletionRequest]
    ) -> Iterator[Sequence[CompletionRequest]]:
        """Splits requests into runs of at most `max_rows` completions."""
        part: list[CompletionRequest] = []
        rows = 0
        for request in requests:
            if part and rows + len(request.seeds) > self._max_rows:
                yield part
                part, rows = [], 0
            part.append(request)
            rows += len(request.seeds)
        if part:
            yield part

    def _read_contexts(
        self, part: _CompletionBatch, forks: bool, limit: int
    ) -> tuple[DialogueRows, Tensor]:
        """Reads the part of each context that is not cached; returns one row per completion, and
        the logits of the next tokens."""
        extended = [kept for n in part.extended if (kept := self._kept[n]) is not None]
        contexts = [tokens for _, tokens in part.contexts]
        seen = [kept.read for kept in extended] or [_count_common(contexts)] * len(contexts)
        fresh = [tokens[n:] for tokens, n in zip(contexts, seen, strict=True)]
        room = 0 if forks else limit
        if extended:
            places = [(kept.rows, kept.row) for kept in extended]
            rows = type(extended[0].rows).join_rows(places, max(map(len, fresh)) + room)
        elif seen[0]:
            common = self._decoder.start(1)
            common.prefill([contexts[0][: seen[0]]], 0)
            rows = common.select([0] * len(contexts), max(map(len, fresh)) + room)
        else:
            rows = self._decoder.start(len(contexts))
        logits = rows.prefill(fresh, room)
        if not forks:
            return rows, logits
        copies = torch.tensor(part.copies, device=logits.device)
        return rows.fork(part.copies, limit), logits.index_select(0, copies)


def _count_common(contexts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all contexts begin with, if reading them once saves a third of what there is to
    read; else 0. One token of every context is left to read."""
    common = count_shared((min(contexts), max(contexts)))  # which all others are between
    common = min(common, min(map(len, contexts)) - 1)
    return common if 3 * common * (len(contexts) - 1) >= sum(map(len, contexts)) else 0


class _DecodingLoop:
    """Decodes rows one token at a time until each has ended.

    Args:
        rows: `R` dialogues.
        noise: `[R, L]` in [0, 1), for at most L tokens per row.

    Attributes:
        places: the batch and row that hold the KV cache of each finished completion, if it is kept.
    """

    def __init__(
        self,
        policy: Policy,
        sampling: TurnSpec,
        rows: DialogueRows,
        noise: Tensor,
        batch: _CompletionBatch,
        on_ended: Callable[[int], None] | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        self._keeps, self._on_ended = keeps, on_ended
        self._policy, self._sampling = policy, sampling
        self._rows, self._noise = rows, noise
        count, device = len(noise), noise.device
        self._ends = torch.tensor(policy.end_ids, dtype=torch.int64, device=device)
        self._live = list(range(count))
        self._runs = torch.ones(count, dtype=torch.bool, device=device)
        self._counts = torch.zeros(count, dtype=torch.int64, device=device)
        self._limits = torch.tensor(batch.limits, dtype=torch.int64, device=device)
        self._longest = max(batch.limits)
        self._abandoned = batch.abandoned
        self._drawn: list[tuple[Tensor, Tensor]] = []  # tokens of the current rows, log-probs
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._logprobs: list[list[float]] = [[] for _ in range(count)]
        self._stop = (
            StopStringDetector(policy.dialogue.read, sampling.stop) if sampling.stop else None
        )
        self._searched: list[list[int]] = [[] for _ in range(count)]  # tokens, for stop strings
        self._lengths = [0] * count
        self._ended = [False] * count
        self.places: dict[int, tuple[DialogueRows, int]] = {}

    def run(self, logits: Tensor) -> list[Completion]:
        """Samples completions, starting from the logits of their first tokens, `[R, V]`."""
        limit = self._longest
        looks = 1 if self._stop and not logits.is_cuda else LOOK_EVERY
        for step in range(limit):
            token = self._draw(logits, step)
            if step == limit - 1 or step % looks == looks - 1:
                if self._stop:
                    self._end_at_stop_strings(self._stop, (step % looks) + 1)
                for row, number in enumerate(self._live):
                    if (is_abandoned := self._abandoned[number]) is not None and is_abandoned():
                        self._limits[row] = self._counts[row]
                runs = (self._runs & (self._counts < self._limits)).tolist()
                if not any(runs) or step == limit - 1:
                    break
                if sum(runs) < self._rows.compact_below * len(runs):
                    token = self._drop(runs, token, step)
            logits = self._rows.step(token)
        self._retire(range(len(self._live)), step)
        require_finite_logits(self._logprobs)
        rows = zip(self._tokens, self._logprobs, self._lengths, self._ended, strict=True)
        return [
            Completion(tuple(t[:n]), tuple(p[:n]), "stop" if ended else "length")
            for t, p, n, ended in rows
        ]

    def _draw(self, logits: Tensor, step: int) -> Tensor:
        """Samples each row's next token, and updates which rows are still running."""
        logprobs = compute_sampling_logprobs(logits, self._sampling)
        token = sample_tokens(logprobs, self._noise[:, step])
        self._drawn.append((token, logprobs.gather(1, token[:, None])[:, 0]))
        counted = self._runs & (self._counts < self._limits)
        self._counts += counted
        self._runs &= ~(counted & torch.isin(token, self._ends))
        return token

    def _end_at_stop_strings(self, stop: StopStringDetector, fresh: int) -> None:
        """Ends each row with the first of its `fresh` newest tokens that completes a stop
        string."""
        newest = torch.stack([token for token, _ in self._drawn[-fresh:]], dim=1).tolist()
        lengths, runs = self._counts.tolist(), self._runs.tolist()
        for row, tokens in enumerate(newest):
            searched = self._searched[self._live[row]]
            for token in tokens[: lengths[row] - len(searched)]:
                searched.append(token)
                if stop.completes(searched):
                    lengths[row], runs[row] = len(searched), False
                    break
        self._counts.copy_(torch.tensor(lengths))
        self._runs.copy_(torch.tensor(runs))

    def _drop(self, runs: list[bool], token: Tensor, step: int) -> Tensor:
        """Drops finished rows; returns the tokens of the remaining rows."""
        self._retire([row for row, going in enumerate(runs) if not going], step)
        going = [row for row, going in enumerate(runs) if going]
        index = torch.tensor(going, device=token.device)
        self._rows = self._rows.select(going, self._longest - step)
        self._live = [self._live[row] for row in going]
        self._noise, self._runs, self._counts, self._limits = (
            of_rows[index] for of_rows in (self._noise, self._runs, self._counts, self._limits)
        )
        return token[index]

    def _retire(self, which: Sequence[int], step: int) -> None:
        """Sets finished rows aside, and stores the length of each completion. All sampled tokens
        but the last have been read, including those after a row's end."""
        tokens, logprobs = (
            torch.stack(steps, 1).tolist() for steps in zip(*self._drawn, strict=True)
        )
        for row, more, likely in zip(self._live, tokens, logprobs, strict=True):
            self._tokens[row] += more
            self._logprobs[row] += likely
        self._drawn = []
        lengths, runs = self._counts.tolist(), self._runs.tolist()
        if self._keeps:
            aside = self._rows.set_aside(which, [step + 1 - lengths[row] for row in which])
            for number, row in enumerate(which):
                self.places[self._live[row]] = (aside, number)
        for row in which:
            self._lengths[self._live[row]] = lengths[row]
            self._ended[self._live[row]] = not runs[row]
        if self._on_ended is not None:
            self._on_ended(len(which))
