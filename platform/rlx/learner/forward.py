"""Computes log-probabilities and values from packed rows, in the fastest form that works on this
machine."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlx.errors import SpecError, summarize_error
from rlx.learner.distributed import Ranks
from rlx.learner.forms import CachedForm, FlexForm, ForwardForm, GroupedForm, PlainForm
from rlx.learner.pack import PackedBatch, pack_rows
from rlx.model import (
    build_attention_mask,
    copy_model,
    do_windows_show,
    find_window,
    keep_first_layers,
    narrow_windows,
)
from rlx.ordered_sums import sum_by_slot, take_rows
from rlx.spec import RunnerSpec

CHUNK = 8192
"""Tokens of the vocabulary per chunk."""


def compute_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    states: Tensor,
    tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes log p(tokens[k] | states[k]) and the entropy H of every state, `CHUNK` by `CHUNK`,
    with

        z = (hidden · weightᵀ + bias) / temperature,    log p = z - logsumexp z,    H = -Σ p log p.

    Args:
        hidden: `[N, D]` last hidden states.
        weight: `[V, D]` of the output layer.
        bias: `[V]`, or None.
        temperatures: `[N]`.
        states: `[K]` indices of hidden states; one may be repeated.
        tokens: `[K]` token ids.

    Returns:
        `[K]` and `[N]` float32, nats. Gradients flow to `hidden`, `weight` and `bias`.
    """
    made: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, temperatures, states, tokens
    )
    return made


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        states: Tensor,
        tokens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        highest = torch.full((count,), -torch.inf, device=hidden.device)
        total = torch.zeros(count, device=hidden.device)  # Σ exp(z - highest)
        spread = torch.zeros_like(total)  # Σ exp(z - highest) · (z - highest)
        chosen = torch.zeros(len(tokens), device=hidden.device)
        for start, z in _iterate_logits(hidden, weight, bias, temperatures):
            top = torch.maximum(highest, z.amax(dim=1))
            fall = (highest - top).nan_to_num(nan=0.0, neginf=0.0)  # total is 0 where it was -inf
            shrink = fall.exp()
            spread = shrink * (spread + fall * total)
            is_here, column = _locate_tokens(tokens, start, z)
            chosen = torch.where(is_here, z[states, column], chosen)
            z -= top[:, None]
            weighted = z.exp()
            total = shrink * total + weighted.sum(dim=1)
            spread += weighted.mul_(z).sum(dim=1)
            highest = top
        log_total = total.log()
        logsumexp, entropy = highest + log_total, log_total - spread / total
        ctx.save_for_backward(
            hidden, weight, bias, temperatures, states, tokens, logsumexp, entropy
        )
        ctx.set_materialize_grads(False)  # the entropy rarely has a gradient
        return chosen - logsumexp[states], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """∂ log p(t) / ∂z = 1[t] - p and ∂H / ∂z = -p · (log p + H), by chunks."""
        hidden, weight, bias, temperatures, states, tokens, logsumexp, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        if of_logprobs is None:
            of_logprobs = torch.zeros(len(tokens), device=hidden.device)
        each = sum_by_slot(of_logprobs, states, len(logsumexp))
        d_hidden = torch.zeros(hidden.shape, device=hidden.device) if to_hidden else None
        d_weight = torch.empty_like(weight) if to_weight else None
        d_bias = torch.empty_like(bias) if to_bias else None
        for start, z in _iterate_logits(hidden, weight, bias, temperatures):
            part = slice(start, start + z.shape[1])
            is_here, column = _locate_tokens(tokens, start, z)
            z -= logsumexp[:, None]
            if of_entropy is None:
                gradient = z.exp_().mul_(-each[:, None])
            else:
                p = z.exp()
                # -p · (each + of_entropy · (log p + H))
                z.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(each[:, None])
                gradient = p.mul_(z).neg_()
            gradient.index_put_((states, column), of_logprobs * is_here, accumulate=True)
            gradient = gradient.div_(temperatures[:, None]).to(weight.dtype)
            if d_hidden is not None:
                d_hidden += gradient @ weight[part]
            if d_weight is not None:
                d_weight[part] = gradient.t() @ hidden
            if d_bias is not None:
                d_bias[part] = gradient.sum(dim=0)
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _iterate_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yields the first token of every chunk, and its `[N, CHUNK]` float32 logits, to be changed."""
    for start in range(0, len(weight), CHUNK):
        part = slice(start, start + CHUNK)
        logits = functional.linear(hidden, weight[part], None if bias is None else bias[part])
        yield start, logits / temperatures[:, None]  # float32, as the temperatures are


def _locate_tokens(tokens: Tensor, start: int, z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which tokens are in a chunk, and a valid column of it for each."""
    column = tokens - start
    return (column >= 0) & (column < z.shape[1]), column.clamp(0, z.shape[1] - 1)


class PackedModule(nn.Module, ABC):
    """A transformer that computes outputs only for the requested tokens, in the form set by
    `use`."""

    form: ForwardForm

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._own = model.config._attn_implementation

    def recompute_layers(self) -> None:
        """Enables activation checkpointing: layers are recomputed in the backward pass.

        Raises:
            SpecError: the model does not declare its layers.
        """
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise SpecError(
                "runner.activation_checkpointing: a model of kind "
                f"{self.model.config.model_type!r} has no layers that can be recomputed"
            )
        for layer in layers:  # transformers' own option would need training mode, thus dropout
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def keep_activations(self) -> None:
        """Undoes `recompute_layers`."""
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                vars(module).pop("forward", None)

    def use(self, form: ForwardForm) -> None:
        """Selects the form of all further calls."""
        attention = form.attention or self._own
        if attention != self.model.config._attn_implementation:
            self.model.set_attn_implementation(attention)
        self.form = form

    @abstractmethod
    def call_model(self, at: Tensor, **arguments: Any) -> Tensor:
        """Returns `[M, W]` outputs of the transformer itself at the indices `at`, `[M]`."""

    def outputs(self, packed: PackedBatch) -> Tensor:
        """Returns the `[M + U, W]` outputs that targets, then branches are predicted from."""

        def read_masked(at: Tensor, **arguments: Any) -> Tensor:
            if "visible" in arguments:
                visible, queries, keys = map(arguments.pop, ("visible", "queries", "keys"))
                config, dtype = self.model.config, self.model.dtype
                # Every attention takes an additive mask.
                mask = build_attention_mask(config, visible, queries, keys, dtype)
                arguments["attention_mask"] = mask
            return self.call_model(at, **arguments)

        return self.form(read_masked, packed)


class PackedPolicy(PackedModule):
    """A causal language model on packed rows; `chunks_logits` is set by `choose_logits`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.chunks_logits = False
        self._keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def call_model(self, at: Tensor, **arguments: Any) -> Tensor:
        """Returns `[M, V]` logits, computed only at the positions that are needed; with chunks the
        `[M, D]` hidden states that they follow from."""
        if self.chunks_logits:
            hidden = self.model.get_decoder()(**arguments).last_hidden_state
            return torch.as_tensor(take_rows(hidden.flatten(0, 1), at))
        rows, length = arguments["input_ids"].shape
        if not self._keeps:
            logits = self.model(**arguments).logits
            return torch.as_tensor(take_rows(logits.flatten(0, 1), at))
        if rows == 1:
            return torch.as_tensor(self.model(**arguments, logits_to_keep=at).logits[0])
        kept, where = (at % length).unique(return_inverse=True)
        logits = self.model(**arguments, logits_to_keep=kept).logits.flatten(0, 1)
        return torch.as_tensor(take_rows(logits, at // length * len(kept) + where))

    def forward(
        self,
        packed: PackedBatch,
        temperatures: Tensor,
        branch_temperatures: Tensor | None = None,
        *,
        learns_entropy: bool = False,
        with_collisions: bool = False,
    ) -> tuple[Tensor, ...]:
        """Returns the log-probability of each target, and the entropy of its distribution.

        Args:
            packed: micro-batch with `M` targets.
            temperatures: `[M]` sampling temperatures; logits are divided by them.
            branch_temperatures: `[U]` likewise for the states of the branches; None without any.
            learns_entropy: whether the entropy has a gradient, which takes memory.
            with_collisions: also return `[M]` Σ π² of each distribution.

        Returns:
            `[M]` and `[M]` float32, nats; with branches also `[K]`, the log-probability of each of
                their tokens.
        """
        outputs = self.outputs(packed)
        if self.chunks_logits and with_collisions:
            # log Σ π² = logsumexp 2z - 2 logsumexp z = 2 log π(t) - log π'(t) with any token t and
            # π' = softmax 2z, which half the temperature gives.
            parts = outputs, packed
            logprobs, entropy = self._forward_chunks(*parts, temperatures, None, False)
            sharper, _ = self._forward_chunks(*parts, temperatures / 2, None, False)
            return logprobs, entropy, (2 * logprobs - sharper).exp()
        if self.chunks_logits:
            return self._forward_chunks(
                outputs, packed, temperatures, branch_temperatures, learns_entropy
            )
        outputs, count = outputs.float(), len(temperatures)
        logprobs = torch.log_softmax(outputs[:count] / temperatures[:, None], dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns_entropy):
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        chosen = logprobs.gather(1, packed.targets[:, None])[:, 0]
        if with_collisions:
            return chosen, entropy, (2 * logprobs).exp().sum(dim=-1)
        if branch_temperatures is None:
            return chosen, entropy
        next_tokens = torch.log_softmax(outputs[count:] / branch_temperatures[:, None], dim=-1)
        branches = packed.branches
        return chosen, entropy, next_tokens[branches.states, branches.tokens]

    def _forward_chunks(
        self,
        hidden: Tensor,
        packed: PackedBatch,
        temperatures: Tensor,
        branch_temperatures: Tensor | None,
        learns_entropy: bool,
    ) -> tuple[Tensor, ...]:
        """Like `forward`, from the `[M + U, D]` hidden states."""
        count, tokens = len(temperatures), packed.targets
        states = torch.arange(count, device=hidden.device)
        if branch_temperatures is not None:
            branches = packed.branches
            states = torch.cat([states, count + branches.states])
            tokens = torch.cat([tokens, branches.tokens])
            temperatures = torch.cat([temperatures, branch_temperatures])
        head = self.model.get_output_embeddings()
        logprobs, entropy = compute_token_logprobs(
            hidden, head.weight, head.bias, temperatures, states, tokens
        )
        entropy = entropy[:count] if learns_entropy else entropy[:count].detach()
        if branch_temperatures is None:
            return logprobs, entropy
        return logprobs[:count], entropy, logprobs[count:]


class PackedValues(PackedModule):
    """A transformer without its language-model head, with a value head, on packed rows.

    `width` is the size of its last hidden state; the head's small random weights come from the
    seed.
    """

    def __init__(self, decoder: PreTrainedModel, width: int, seed: int) -> None:
        super().__init__(decoder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = _ValueHead(width)

    def call_model(self, at: Tensor, **arguments: Any) -> Tensor:
        """Returns `[M, D]` last hidden states."""
        hidden = self.model(**arguments).last_hidden_state
        return torch.as_tensor(take_rows(hidden.flatten(0, 1), at))

    def forward(self, packed: PackedBatch) -> Tensor:
        """Returns `[M]` float32: the value of the state before each target."""
        return torch.as_tensor(self.head(self.outputs(packed)))


class _ValueHead(nn.Module):
    """Linear head in float32 whatever the dtype of the weights: at 0.7, bfloat16 has a resolution
    of only 0.004."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / (width + 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight.float() + self.bias.float()


AnyModule = TypeVar("AnyModule", bound=PackedModule)
WHOLE_LOGITS = 2 << 30
"""Logits of a micro-batch with more bytes than this in float32 are computed by chunks of the
vocabulary. Several tensors of that size are alive at once."""
FORMS: dict[str, tuple[ForwardForm, ...]] = {
    "cuda": (FlexForm(), GroupedForm(), CachedForm(), PlainForm()),
    "cpu": (GroupedForm(), CachedForm(), PlainForm()),
}
"""By device type, fastest first. Plain rows are the reference."""
NEAR = 1e-4
"""Maximum relative L2 distance of outputs; about 100 times the rounding error."""
LONGEST_REASON = 200
"""Characters of an error's message that are kept."""
NARROW = 16
"""Maximum width of an attention window in the trial, in tokens: shorter than its rows."""
SHAPE = (18, 12, (12, 5, 12), 4, (3, 5))
"""Tokens that all prompts begin with, of the rest of a prompt, of each answer, of the question, and
of each confidence."""


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The chosen form, and for each faster form the reason why it does not fit the model.

    Attributes:
        logits: how logits are computed, if not as a whole; see `choose_logits`.
    """

    form: ForwardForm
    refused: tuple[str, ...]
    logits: str = ""

    def __str__(self) -> str:
        shares = (
            "shared prefixes are computed once" if self.form.merges else "prefixes are not shared"
        )
        why = "".join(f"; not {reason}" for reason in self.refused)
        return f"{self.form.name}: {shares}{why}{self.logits and f'; {self.logits}'}"


def choose_form(module: PackedModule, ranks: Ranks) -> FormChoice:
    """Tries the forms of a device, and makes the module, not yet sharded, use the first that fits.

    All ranks make the same choice; each tries the forms on its device.

    Raises:
        SpecError: the model cannot compute plain rows either.
    """
    forms = FORMS[ranks.device.type]
    trial = _copy_first_layers(module, ranks.device)
    trial.use(forms[-1])
    has_windows = find_window(trial.model.config) is not None
    hidden = has_windows and not do_windows_show(trial.model, NARROW)
    with narrow_windows(trial.model, NARROW) if has_windows else nullcontext():
        refused = _list_refused_forms(trial, forms[:-1], hidden=hidden)
    most = max(ranks.gather(refused), key=len)
    module.use(forms[len(most)])
    return FormChoice(forms[len(most)], tuple(most))


def _copy_first_layers(module: AnyModule, device: torch.device) -> AnyModule:
    """Copies the first layers of a module, at least one of every kind, for a trial in float32.

    They keep their activations, so nothing refers to itself, and the memory is free as soon as the
    copy is dropped.
    """
    with keep_first_layers(module):
        copied = copy_model(module, device, torch.float32)
    copied.keep_activations()
    return copied


def choose_logits(module: PackedPolicy, runner: RunnerSpec, ranks: Ranks) -> str:
    """Makes a policy that has a form compute its logits by chunks of the vocabulary, if they are
    large.

    Returns:
        How they are computed, or why they are not chunked, the same on every rank; empty for whole
            logits that are small.
    """
    vocabulary = module.model.config.get_text_config().vocab_size
    if runner.micro_batch_tokens * vocabulary * 4 <= WHOLE_LOGITS:
        return ""
    faults = ranks.gather(_find_chunk_fault(module, runner, ranks.device))
    fault = next(filter(None, faults), "")
    module.chunks_logits = not fault
    return f"whole logits: {fault}" if fault else f"logits by chunks of {CHUNK} tokens"


def _find_chunk_fault(module: PackedPolicy, runner: RunnerSpec, device: torch.device) -> str:
    if runner.zero_stage == 3:
        return "zero_stage 3 shards the output layer"
    if type(module.model.get_output_embeddings()) is not nn.Linear:
        return "the output layer is not a plain matrix"
    trial = _copy_first_layers(module, device)

    def compute_logprobs(packed: PackedBatch) -> Tensor:
        temperatures = torch.linspace(0.5, 1.5, len(packed.targets), device=device)
        return torch.cat(trial(packed, temperatures, learns_entropy=True))

    expected = _run_trial(trial, compute_logprobs)
    trial.chunks_logits = True
    try:
        found = _run_trial(trial, compute_logprobs)
    except Exception as error:  # noqa: BLE001  (a model may fail in any way)
        return summarize_error(error)[:LONGEST_REASON]
    return _describe_difference(found, expected, "whole logits")


def _list_refused_forms(
    module: PackedModule, forms: Sequence[ForwardForm], *, hidden: bool
) -> list[str]:
    """Tries forms until one fits; returns those that do not, with the reasons. `hidden`: the model
    has windows that a trial cannot narrow."""

    def compute_outputs(packed: PackedBatch) -> Tensor:
        width = int(packed.columns.max()) + 1
        order = (packed.rows * width + packed.columns).argsort()  # that of packing is the form's
        return module.outputs(packed)[order.to(packed.token_ids.device)]

    try:
        expected = _run_trial(module, compute_outputs)
    except Exception as error:
        kind, why = module.model.config.model_type, summarize_error(error)[:LONGEST_REASON]
        raise SpecError(
            f"model: a model of kind {kind!r} cannot compute the log-probabilities of a dialogue "
            f"({why}); use another model"
        ) from error
    refused: list[str] = []
    for form in forms:
        reason = "the model's windows cannot be tried" if hidden else ""
        if not hidden:
            try:
                module.use(form)
                found = _run_trial(module, compute_outputs)
                reason = _describe_difference(found, expected, "plain rows")
            except Exception as error:  # noqa: BLE001  (a model may fail in any way)
                reason = summarize_error(error)[:LONGEST_REASON]
        if not reason:
            break
        refused.append(f"{form.name} ({reason})")
    return refused


def _describe_difference(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], of: str
) -> str:
    """Says how far results or gradients are from those expected; empty if they are near."""
    for what, a, b in zip(("results", "gradients"), found, expected, strict=True):
        distance, length = float((a - b).norm()), float(b.norm())
        if not distance <= NEAR * length:
            return f"{what} differ from those of {of} by {distance:.1g} of {length:.1g}"
    return ""


def _run_trial(
    module: PackedModule, compute: Callable[[PackedBatch], Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns what is computed of a few random trees, and the gradient of the first trainable
    parameters: of several, since that of an adapter's A is zero while B is zero."""
    learned = [p for p in module.model.parameters() if p.requires_grad][:4]
    packed = pack_rows(*_build_trial_rows(module), merge=module.form.merges)
    with torch.enable_grad():
        results = compute(packed.to(next(module.model.parameters()).device))
    if not learned:
        return results.detach(), results.new_zeros(0)
    weights = torch.linspace(-1, 1, results.numel(), device=results.device).view_as(results)
    gradients = torch.autograd.grad((results.float() * weights).sum(), learned)
    return results.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def _build_trial_rows(module: PackedModule) -> tuple[Tensor, Tensor, Tensor]:
    """Returns two-turn rows of two trees: token ids, token mask, wanted tokens."""
    vocabulary = module.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def generate_token_ids(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    system, prompt, answers, question, confidences = SHAPE
    rows, learned = [], []
    common = generate_token_ids(system)
    for tree in range(2):
        opening = [*common, *generate_token_ids(prompt)]
        start = generate_token_ids(3)  # answers share a first token too
        for answer in answers:
            answered = [*opening, *start[: tree + 1], *generate_token_ids(answer)]
            context = [*answered, *generate_token_ids(question)]
            rows += [answered, *([*context, *generate_token_ids(count)] for count in confidences)]
            learned += [len(opening), *[len(context)] * len(confidences)]
    width = max(map(len, rows))
    column = torch.arange(width)
    is_token = column < torch.tensor([[len(row)] for row in rows])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    want = is_token & (column >= torch.tensor(learned)[:, None])
    return ids, is_token, want
