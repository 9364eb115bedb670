"""What decodes a model: batches of dialogues that share prefixes, or are read with the model's own
forward pass; and which of these decoders computes a model."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from rlx.errors import SpecError, summarize_error
from rlx.model import build_attention_mask, do_windows_show, find_window, narrow_windows
from rlx.sampler.gpu_steps import WARM_UP, CapturedSteps
from rlx.sampler.plain_decoder import PlainDecoder, unknown_part
from rlx.sampler.shared_attention import (
    AncestorLevel,
    PrefillAttention,
    RowSuffixes,
    StepAttention,
    join_levels,
)

COMPACT_BELOW = 0.75
"""Finished rows are dropped once the fraction of running rows is below this."""
COMPACT_CAPTURED_BELOW = 0.5
"""The same where steps are captured: each smaller batch costs a capture."""


class DialogueRows(Protocol):
    """`R` dialogues with their KV caches.

    `room` is the number of tokens that are likely to be read next; caches reserve space for them.

    Attributes:
        compact_below: fraction of running rows below which it pays to drop the others.
    """

    compact_below: float

    def prefill(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        """Reads one or more tokens in every dialogue; returns `[R, V]` logits of the next token."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one token per dialogue, `[R]`; returns `[R, V]` logits of the next token."""
        ...

    def fork(self, copies: Sequence[int], room: int) -> Self:
        """Returns dialogues that continue the given rows; a row may be repeated."""
        ...

    def select(self, rows: Sequence[int], room: int) -> Self:
        """Returns only the given rows."""
        ...

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        """Returns the given rows, each without its last `excess` tokens."""
        ...

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        """Joins rows of several batches, in order; all must have been forked equally often."""
        ...


class Decoder(Protocol):
    """Computes a model; its description says how, for the run's record."""

    description: str

    def start(self, rows: int) -> DialogueRows:
        """Returns empty dialogues."""
        ...


class SharingDecoder:
    """A plain decoder whose rows share ancestors; `why_not` tells why steps cannot be captured."""

    def __init__(
        self,
        decoder: PlainDecoder,
        captures: bool = False,
        why_not: str | None = None,
    ) -> None:
        self._decoder, self._captures = decoder, captures and why_not is None
        steps = f", steps not captured: {why_not}" if why_not else ", captured steps" * captures
        self.description = f"compact decoder, shared ancestors{steps}"

    def start(self, rows: int) -> "SharedRows":
        d = self._decoder
        empty = d.template_tensor.new_empty(d.layers, d.kv_heads, rows, 0, d.width)
        suffixes = RowSuffixes(empty, empty, [0] * rows)
        return SharedRows(d, [], suffixes, captures=self._captures)


class SharedRows:
    """See `rlx.sampler.decoders.DialogueRows`."""

    def __init__(
        self,
        decoder: PlainDecoder,
        levels: list[tuple[AncestorLevel, list[int]]],
        suffix: RowSuffixes,
        *,
        captures: bool,
    ) -> None:
        self._decoder, self._captures = decoder, captures
        self.compact_below = COMPACT_CAPTURED_BELOW if captures else COMPACT_BELOW
        self._levels = levels  # each with the index of every row's ancestor
        self._suffix = suffix
        self._attention: StepAttention | None = None
        self._captured: CapturedSteps | None = None

    def __len__(self) -> int:
        return len(self._suffix.lengths)

    @property
    def _lengths(self) -> list[int]:
        """Tokens read so far per row, ancestors included."""
        read = list(self._suffix.lengths)
        for level, places in self._levels:
            read = [n + level.lengths[place] for n, place in zip(read, places, strict=True)]
        return read

    def prefill(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        width = max(map(len, fresh))
        self._make_room(width, room)
        suffix = self._suffix
        suffix.blank(suffix.longest + width)
        attention = PrefillAttention(self._decoder, self._levels, suffix, [len(f) for f in fresh])
        device = self._decoder.template_tensor.device
        before = torch.tensor(self._lengths, device=device)
        hidden = self._decoder.compute_hidden_states(
            torch.tensor([token for row in fresh for token in row], device=device),
            before[attention.rows] + attention.columns,
            max(self._lengths) + width,
            attention,
        )
        ends = torch.tensor([len(f) for f in fresh], device=device).cumsum(0) - 1
        lengths = [n + len(f) for n, f in zip(suffix.lengths, fresh, strict=True)]
        self._suffix = RowSuffixes(suffix.keys, suffix.values, lengths)
        self._attention = self._captured = None
        return self._decoder.logits(hidden[ends])

    def step(self, tokens: Tensor) -> Tensor:
        self._make_room(1, self._suffix.longest)
        suffix, parts = self._suffix, (self._decoder, self._levels, self._suffix)
        if self._captures:
            if self._captured is None or self._captured.until == suffix.longest:
                self._captured = CapturedSteps(*parts, self._lengths)
            logits = self._captured.step(tokens)
        else:
            attention = self._attention = self._attention or StepAttention(*parts, self._lengths)
            attention.advance()
            hidden = self._decoder.compute_hidden_states(
                tokens, attention.positions, attention.longest, attention
            )
            logits = self._decoder.logits(hidden)
        self._suffix = RowSuffixes(suffix.keys, suffix.values, [n + 1 for n in suffix.lengths])
        return logits

    def _make_room(self, needed: int, more: int) -> None:
        """Reallocates the suffix with room for `needed + more` columns if `needed` do not fit."""
        suffix = self._suffix
        if suffix.room < suffix.longest + needed:
            everything = [(suffix, row) for row in range(len(self))]
            self._suffix = RowSuffixes.gather_rows(everything, suffix.lengths, needed + more)
            self._attention = self._captured = None

    def fork(self, copies: Sequence[int], room: int) -> Self:
        suffix, longest = self._suffix, self._suffix.longest
        keys = suffix.keys[:, :, :, :longest].mT.contiguous()
        level = AncestorLevel(keys, suffix.values[:, :, :, :longest].contiguous(), suffix.lengths)
        levels = [(above, [places[c] for c in copies]) for above, places in self._levels]
        layers, heads, _, _, width = suffix.keys.shape
        shape = layers, heads, len(copies), room, width
        keys, values = (suffix.keys.new_empty(shape) for _ in range(2))
        new = RowSuffixes(keys, values, [0] * len(copies))
        levels.append((level, list(copies)))
        return self._rebuild(levels, new)

    def select(self, rows: Sequence[int], room: int) -> Self:
        return type(self).join_rows([(self, row) for row in rows], room)

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        suffix = self._suffix
        lengths = [suffix.lengths[r] - n for r, n in zip(rows, excess, strict=True)]
        kept = RowSuffixes.gather_rows([(suffix, row) for row in rows], lengths, 0)
        levels = [(level, [places[row] for row in rows]) for level, places in self._levels]
        return self._rebuild(levels, kept)

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        lengths = [rows._suffix.lengths[row] for rows, row in places]
        suffix = RowSuffixes.gather_rows(
            [(rows._suffix, row) for rows, row in places], lengths, room
        )
        first = places[0][0]
        levels = []
        for depth in range(len(first._levels)):
            ancestors = [rows._levels[depth] for rows, _ in places]
            levels.append(
                join_levels(
                    [(lv, at[row]) for (lv, at), (_, row) in zip(ancestors, places, strict=True)]
                )
            )
        return first._rebuild(levels, suffix)

    def _rebuild(self, levels: list[tuple[AncestorLevel, list[int]]], suffix: RowSuffixes) -> Self:
        return type(self)(self._decoder, levels, suffix, captures=self._captures)


class CachedDecoder:
    """Decodes with a transformers model, called unchanged; `why` no faster decoder can be used."""

    def __init__(self, model: PreTrainedModel, why: str) -> None:
        self._model = model
        self.description = f"the model's own forward pass: {why}"

    def start(self, rows: int) -> "CachedRows":
        return CachedRows(
            self._model, None, torch.zeros(rows, 0, dtype=torch.bool).to(self._model.device)
        )


class CachedRows:
    """See `rlx.sampler.decoders.DialogueRows`.

    Args:
        cache: keys and values of `R` rows over `L` columns; None before the first prefill.
        is_token: `[R, L]` bool, False for padding.
    """

    compact_below = COMPACT_BELOW

    def __init__(
        self, model: PreTrainedModel, cache: DynamicCache | None, is_token: Tensor
    ) -> None:
        self._model, self._cache, self._is_token = model, cache, is_token

    def prefill(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        device = self._is_token.device
        width = max(map(len, fresh))
        ids = torch.zeros(len(fresh), width, dtype=torch.int64)
        is_new = torch.zeros(len(fresh), width, dtype=torch.bool)
        for row, tokens in enumerate(fresh):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            is_new[row, width - len(tokens) :] = True
        return self._forward(ids.to(device), is_new.to(device))

    def step(self, tokens: Tensor) -> Tensor:
        return self._forward(tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.bool))

    def _forward(self, ids: Tensor, is_new: Tensor) -> Tensor:
        width = ids.shape[1]
        self._is_token = torch.cat([self._is_token, is_new], dim=1)
        self._cache = self._cache or DynamicCache()
        positions = (self._is_token.cumsum(dim=1) - 1).clamp(min=0)
        column = torch.arange(positions.shape[1], device=positions.device)
        row = column[-width:, None]
        # A padding column attends to itself, since a softmax over nothing is NaN.
        visible = (column <= row) & self._is_token[:, None, :] | (column == row)
        eager = self._model.config._attn_implementation == "eager"  # takes no bool masks
        output = self._model(
            input_ids=ids,
            position_ids=positions[:, -width:],
            attention_mask=build_attention_mask(
                self._model.config,
                visible[:, None],
                positions[:, -width:],
                positions,
                self._model.dtype if eager else None,
            ),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def fork(self, copies: Sequence[int], room: int) -> Self:
        return self.select(copies, room)

    def select(self, rows: Sequence[int], room: int) -> Self:
        index = torch.tensor(rows, device=self._is_token.device)
        is_token = self._is_token.index_select(0, index)
        some = is_token.any(dim=0)  # from the first column with a token on
        start = int(some.to(torch.int8).argmax()) if len(some) else 0
        cache = DynamicCache()
        for number, layer in enumerate(self._layers):
            cache.update(*(side[:, :, start:].index_select(0, index) for side in layer), number)
        return type(self)(self._model, cache, is_token[:, start:])

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        kept = self.select(rows, 0)
        behind = kept._is_token.flip(1).cumsum(dim=1).flip(1)
        kept._is_token &= behind > torch.tensor(excess, device=behind.device)[:, None]
        return kept

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        sources: dict[int, tuple[Self, list[int], list[int]]] = {}
        for position, (source, row) in enumerate(places):
            _, rows, positions = sources.setdefault(id(source), (source, [], []))
            rows.append(row)
            positions.append(position)
        batches = [source.select(rows, 0) for source, rows, _ in sources.values()]
        order = torch.tensor([p for _, _, positions in sources.values() for p in positions])
        # All together, shorter ones padded on the left.
        length = max(batch._is_token.shape[1] for batch in batches)
        pads = [length - batch._is_token.shape[1] for batch in batches]
        cache = DynamicCache()
        for number, layers in enumerate(zip(*(batch._layers for batch in batches), strict=True)):
            keys, values = (
                torch.cat([pad(kept, (0, 0, n, 0)) for kept, n in zip(side, pads, strict=True)])
                for side in zip(*layers, strict=True)
            )
            cache.update(keys, values, number)
        is_token = [pad(batch._is_token, (n, 0)) for batch, n in zip(batches, pads, strict=True)]
        joined = cls(batches[0]._model, cache, torch.cat(is_token))
        return joined.select(order.argsort().tolist(), room)

    @property
    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        layers = () if self._cache is None else self._cache.layers
        return [(layer.keys, layer.values) for layer in layers]


class UncachedDecoder:
    """Decodes with any causal model of transformers, called unchanged; `why` no cache can be used.

    Every token is sampled after the whole dialogue has been read again. That is slow, but it serves
    recurrent and hybrid models, and those with an attention of their own.
    """

    def __init__(self, model: PreTrainedModel, why: str) -> None:
        self._model = model
        self.description = f"the model's own forward pass over the whole dialogue: {why}"

    def start(self, rows: int) -> "UncachedRows":
        return UncachedRows(self._model, [[] for _ in range(rows)])


class UncachedRows:
    """See `rlx.sampler.decoders.DialogueRows`; `tokens` are those of every dialogue."""

    compact_below = COMPACT_BELOW

    def __init__(self, model: PreTrainedModel, tokens: list[list[int]]) -> None:
        self._model, self._tokens = model, tokens
        self._keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def prefill(self, fresh: Sequence[Sequence[int]], room: int) -> Tensor:
        for tokens, new in zip(self._tokens, fresh, strict=True):
            tokens += new
        width = max(map(len, self._tokens))  # padding is on the right, where no token sees it
        rows = [tokens + [0] * (width - len(tokens)) for tokens in self._tokens]
        last = torch.tensor([len(tokens) - 1 for tokens in self._tokens])
        kept, where = last.unique(return_inverse=True)
        if not self._keeps:
            kept, where = torch.arange(width), last
        device = self._model.device
        limited = {"logits_to_keep": kept.to(device)} if self._keeps else {}
        ids = torch.tensor(rows, device=device)
        logits = self._model(input_ids=ids, use_cache=False, **limited).logits
        return torch.as_tensor(logits[torch.arange(len(rows)), where])

    def step(self, tokens: Tensor) -> Tensor:
        return self.prefill(tokens[:, None].tolist(), 0)

    def fork(self, copies: Sequence[int], room: int) -> Self:
        return type(self)(self._model, [list(self._tokens[row]) for row in copies])

    def select(self, rows: Sequence[int], room: int) -> Self:
        return self.fork(rows, room)

    def set_aside(self, rows: Sequence[int], excess: Sequence[int]) -> Self:
        kept = self.fork(rows, 0)
        for tokens, count in zip(kept._tokens, excess, strict=True):
            del tokens[len(tokens) - count :]
        return kept

    @classmethod
    def join_rows(cls, places: Sequence[tuple[Self, int]], room: int) -> Self:
        tokens = [list(source._tokens[row]) for source, row in places]
        return cls(places[0][0]._model, tokens)


NARROW = 5
"""Maximum width of an attention window in the trial, in tokens: shorter than its contexts."""
NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Maximum relative difference of logits (L2 norms), by dtype."""
PLAIN = "the plain decoder"
CAPTURED = frozenset({"cuda"})
"""Devices on which steps are captured, because launching kernels takes time."""
ROUGHLY = 0.1
"""Maximum relative difference for all other dtypes; rounding errors are well below it."""


def choose_decoder(model: PreTrainedModel) -> Callable[[], Decoder]:
    """Chooses a decoder for a model by comparing logits; the choice stays valid when the weights
    change.

    Returns:
        A function that builds the decoder for the model's current weights.

    Raises:
        SpecError: the model cannot be sampled from.
    """
    window = find_window(model.config)
    why = unknown_part(model) or (window and f"an attention window of {window}")
    if not why:

        def build(**options: Any) -> SharingDecoder:
            return SharingDecoder(PlainDecoder(model), **options)

        why = _find_decoder_fault(model, PLAIN, build)
        if why is None and model.device.type not in CAPTURED:
            return build
        if why is None:
            fault = _find_decoder_fault(model, PLAIN, partial(build, captures=True))
            return partial(build, captures=True, why_not=fault)
    cached = CachedDecoder(model, f"it has {why}")
    if window is not None and not do_windows_show(model, NARROW):
        return _choose_uncached(model, "its attention windows cannot be tried")
    with narrow_windows(model, NARROW) if window is not None else nullcontext():
        fault = _find_decoder_fault(model, "its own forward pass with a cache", lambda: cached)
        if fault is None:
            return lambda: cached
        with torch.inference_mode():
            if not _compute_model_logits(model, [0, 1, 2], [3]).isfinite().all():
                return lambda: cached  # sampling reports it
        return _choose_uncached(model, f"without a cache, for it has {fault}")


def _choose_uncached(model: PreTrainedModel, why: str) -> Callable[[], Decoder]:
    """The decoder that fits every causal model; raises SpecError if it does not fit this one."""
    uncached = UncachedDecoder(model, why)
    if fault := _find_decoder_fault(model, "its own forward pass", lambda: uncached):
        raise SpecError(
            f"model: a model of kind {model.config.model_type!r} cannot be sampled from: it has "
            f"{fault}; use a causal language model"
        )
    return lambda: uncached


def _find_decoder_fault(
    model: PreTrainedModel, name: str, build: Callable[[], Decoder]
) -> str | None:
    """Explains why a decoder cannot be used; None if it can."""
    try:
        difference = _compute_logit_difference(model, build())
    except Exception as error:  # noqa: BLE001  (an unusual model may fail in any way)
        return f"parts that {name} does not support ({summarize_error(error)[:200]})"
    if difference < NEAR.get(model.dtype, ROUGHLY):
        return None
    return f"logits that differ from those of {name} by {difference:.1g}"


@torch.inference_mode()
def _compute_logit_difference(model: PreTrainedModel, decoder: Decoder) -> float:
    """Returns the relative difference between the logits of forked dialogues and those of the
    model's own forward pass."""
    generator = torch.Generator().manual_seed(0)
    count = model.get_input_embeddings().num_embeddings
    drawn = torch.randint(count, (2 + WARM_UP + 2, 16), generator=generator)
    contexts = [drawn[0].tolist(), drawn[1, :7].tolist()]
    copies, steps = [0, 1, 0], drawn[2:, :3].to(model.device)
    rows = decoder.start(len(contexts))
    logits = [rows.prefill(contexts, 0)[copies]]
    forked = rows.fork(copies, len(steps))
    logits += [forked.step(tokens).clone() for tokens in steps]
    ours = torch.stack(logits, dim=1).float()
    theirs = torch.stack(
        [
            _compute_model_logits(model, contexts[copy], tokens.tolist())
            for copy, tokens in zip(copies, steps.T, strict=True)
        ]
    ).float()
    return float((ours - theirs).norm() / theirs.norm())


def _compute_model_logits(model: PreTrainedModel, context: list[int], tokens: list[int]) -> Tensor:
    """Returns the logits after the context and after each of the tokens, `[1 + tokens, V]`."""
    ids = torch.tensor([context + tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 :]
    return logits
