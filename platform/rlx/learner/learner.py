"""The learner, which updates the policy: its engine, which takes optimizer steps by DeepSpeed, the
loss of a micro-batch, and the statistics of a step."""

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlx.batch import TokenBatch
from rlx.errors import RlxError, SpecError
from rlx.importing import hide_packages
from rlx.kl import kl_terms
from rlx.learner.distributed import Ranks
from rlx.learner.forward import PackedPolicy, choose_form, choose_logits
from rlx.learner.pack import Branches, PackedBatch, RankMicroBatches, copy_to
from rlx.loss import compute_expected_score_loss, compute_token_losses
from rlx.model import (
    Policy,
    adapter_weights,
    convert_weights,
    iterate_merged_weights,
    write_model,
)
from rlx.ordered_sums import sum_by_slot
from rlx.rollout import Dialogue
from rlx.spec import CriticSpec, LossSpec, OptimizerSpec, RunnerSpec
from rlx.step import TrainBatch

with hide_packages("mlflow"):  # DeepSpeed's autotuner would import it, which takes most of a second
    import deepspeed
with patch.object(deepspeed.runtime.compiler, "compile", lambda: lambda function: function):
    # DeepSpeed imports this to check for the Muon optimizer; unpatched, that loads a compiler.
    import deepspeed.runtime.zero.muon.muon_optimizer
AdamSpec = OptimizerSpec | CriticSpec


def build_adamw(parameters: Iterable[nn.Parameter], spec: AdamSpec) -> torch.optim.Optimizer:
    """Builds AdamW with the spec's settings."""
    return torch.optim.AdamW(
        parameters,
        lr=spec.learning_rate,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
    )


class TrainingEngine:
    """Owns trained weights and their optimizer. A process may have several engines.

    Args:
        module: on any device, in any precision. Parameters without `requires_grad` are frozen.
        section: YAML section of `spec`, for error messages.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: AdamSpec,
        runner: RunnerSpec,
        ranks: Ranks,
        *,
        section: str,
    ) -> None:
        self._section = section
        self._runner = runner
        self._ranks = ranks
        self._module = module
        self._module.zero_grad()  # drop gradients from before this engine
        config = _build_deepspeed_config(runner, spec, ranks)
        _place_weights(module, runner, ranks.device, config)
        learned = [p for p in self._module.parameters() if p.requires_grad]
        self._engine, *_ = deepspeed.initialize(
            model=self._module,
            optimizer=build_adamw(learned, spec),
            config=config,
            dist_init_required=False,
        )
        # No dropout: the gradient must be that of exactly the policy that sampled.
        self._module.eval()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls the module's forward; under ZeRO stage 3, every rank must call equally often."""
        return self._engine(*arguments, **options)

    def begin_phase(self, spec: AdamSpec, *, fresh: bool) -> None:
        """Applies the optimizer settings of a phase; `fresh` resets Adam's moments."""
        if fresh:  # of AdamW itself, which ZeRO may have wrapped
            outer = self._engine.optimizer
            getattr(outer, "optimizer", outer).state.clear()
        # ZeRO's wrappers keep their own bound; stage 0 reads the configuration at every step.
        self._engine._config.gradient_clipping = spec.max_grad_norm
        if hasattr(self._engine.optimizer, "clip_grad"):
            self._engine.optimizer.clip_grad = spec.max_grad_norm
        for group in self._engine.optimizer.param_groups:
            group.update(betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)

    def step(
        self, share: RankMicroBatches, term: Callable[[PackedBatch], Tensor], rate: float
    ) -> float:
        """Takes one optimizer step on the sum of a loss term over micro-batches and ranks.

        `term` computes a micro-batch's part of the loss, `[]`, already divided by the denominators
        of the whole step. Returns the global gradient norm before clipping, the same on every rank;
        raises RlxError if it is not finite.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        for number, packed in enumerate(share, start=1):
            self._engine.set_gradient_accumulation_boundary(number == len(share))
            # DeepSpeed averages over ranks; denominators are global, so ranks must be summed.
            self._engine.backward(term(packed) * self._ranks.count)
        norm = self._finish()
        if not math.isfinite(norm):
            raise RlxError(
                f"the gradient is not finite: lower {self._section}.learning_rate, or look for "
                "extreme rewards with `rlx samples RUN --sort reward`"
            )
        return norm

    def _finish(self) -> float:
        """Runs the optimizer step; returns the gradient norm before clipping."""
        if self._runner.zero_stage > 0 or self._runner.dtype != "float32":
            self._engine.step()
            return float(self._engine.get_global_grad_norm())
        # Plain data parallelism: gradients are already reduced, and DeepSpeed clips them without
        # reporting their norm.
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._engine.step()
        return float(norm)

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer state to a folder; every rank must call it."""
        self._engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)

    def load(self, folder: Path, *, universal: bool = False) -> None:
        """Loads a checkpoint; every rank must call it.

        Args:
            folder: written by `save` with the same number of ranks and ZeRO stage.
            universal: the folder was written by `convert_checkpoints` instead, from any ranks and
                stage.

        Raises:
            RlxError: DeepSpeed cannot load the checkpoint.
        """
        self._engine._config.load_universal_checkpoint = universal
        found, _ = self._engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if found is None:
            raise RlxError(f"DeepSpeed cannot load the checkpoint {folder}")
        for name, parameter in self._module.named_parameters() if universal else ():
            if not parameter.requires_grad:  # DeepSpeed's conversion omits it
                whole = torch.load(folder / "zero" / name / "fp32.pt", weights_only=True)["param"]
                with (
                    torch.no_grad(),
                    deepspeed.zero.GatheredParameters(
                        [parameter], modifier_rank=0, enabled=self._runner.zero_stage == 3
                    ),
                ):
                    parameter.copy_(whole)

    def gather_parameter(self, parameter: nn.Parameter) -> Tensor:
        """Returns a parameter's full value without gradient, gathered if it is sharded."""
        if self._runner.zero_stage < 3:
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            return parameter.detach().clone()


def _place_weights(
    module: nn.Module, runner: RunnerSpec, device: torch.device, config: dict[str, Any]
) -> None:
    """Moves a module to the rank's device in the precision of training, one weight at a time; under
    ZeRO stage 3 a rank keeps its part of each.

    DeepSpeed makes the float32 weights that Adam updates from those in the precision of training.
    """
    dtype = getattr(torch, runner.dtype)
    convert_weights(module, dtype)
    if runner.zero_stage < 3:
        module.to(device)
        return
    deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def shard_frozen_module(module: nn.Module, runner: RunnerSpec, ranks: Ranks) -> Callable[..., Any]:
    """Shards a module that is not trained, under ZeRO stage 3.

    Its weights may be those of another module that is not sharded yet, which keeps them. Every rank
    must call the returned forward equally often.
    """
    config = _build_deepspeed_config(runner, OptimizerSpec(), ranks)
    config["zero_optimization"] = {"stage": 3}
    _place_weights(module, runner, ranks.device, config)
    engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
    module.eval()
    forward: Callable[..., Any] = engine
    return forward


def _build_deepspeed_config(runner: RunnerSpec, spec: AdamSpec, ranks: Ranks) -> dict[str, Any]:
    # By default, gradients of a bfloat16 model are accumulated in bfloat16; stage 0 requires that.
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if runner.zero_stage else {}
    zero: dict[str, Any] = {"stage": runner.zero_stage}
    if runner.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": ranks.device.type == "cuda"}
    return {
        **sums,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": ranks.count,
        "gradient_clipping": spec.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": runner.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


@dataclass(frozen=True, eq=False, slots=True)
class ConfidenceBranches:
    """The branches of a step's confidences: one per row and value.

    Attributes:
        branches: `R` continuations.
        scores: `[R]` score of the value under the row's label.
        weights: `[R]` weight of the row in the loss.
        values: number of values of a row.
    """

    branches: Branches
    scores: Tensor
    weights: Tensor
    values: int


def encode_confidences(
    values: Sequence[str], span: str, dialogue: Dialogue
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each value after the opening tag of its span, none a prefix of another.

    If the tokens of one value begin another's, as those of 0.8 begin 0.85, each is followed by the
    first token of the closing tag, which tells them apart.

    Raises:
        SpecError: the vocabulary lacks a part of a value, joins it with its tags in one token, or
            does not tell two values apart.
    """
    opening, closing = f"<{span}>", f"</{span}>"
    tokens, closed = [], []
    for text in values:
        ids = dialogue.encode(f"{opening}{text}{closing}")
        _, ends = dialogue.read(ids)
        first, last = len(opening), len(opening) + len(text)
        if first not in ends or last not in ends:
            raise SpecError(
                f"loss.expected: this model's tokenizer joins {text!r} with a tag around it in one "
                "token, so the tag's end is no place where the model chooses a confidence"
            )
        begin, stop = ends.index(first) + 1, ends.index(last) + 1
        tokens.append(ids[begin:stop])
        closed.append(ids[begin : stop + 1])
    tokens = tokens if _is_prefix_free(tokens) else closed
    if not _is_prefix_free(tokens):
        raise SpecError(
            f"loss.expected: this model's tokenizer does not tell the values of <{span}> apart: "
            f"{', '.join(values)}"
        )
    return tuple(tokens)


def _is_prefix_free(sequences: Sequence[tuple[int, ...]]) -> bool:
    ordered = sorted(sequences)
    return all(longer[: len(shorter)] != shorter for shorter, longer in pairwise(ordered))


def build_confidence_branches(
    train: TrainBatch, tokens: Sequence[tuple[int, ...]]
) -> ConfidenceBranches | None:
    """The branches of a batch, with `tokens` from `encode_confidences`; None if no confidence has a
    weight in the loss."""
    expected = train.expected
    if expected is None:
        return None
    weights = expected.coefficient * train.weights[expected.rows, expected.starts]
    weighs = weights != 0
    if not weighs.any():
        return None
    rows, starts, count = expected.rows[weighs], expected.starts[weighs], len(tokens)
    return ConfidenceBranches(
        branches=Branches(
            rows=rows.repeat_interleave(count),
            starts=starts.repeat_interleave(count),
            tokens=tuple(tokens) * len(rows),
        ),
        scores=torch.as_tensor(expected.scores[weighs].flatten()),
        weights=weights[weighs].repeat_interleave(count),
        values=count,
    )


LARGEST = ("ratio_max", "token_ratio_max")
"""Totals of `UpdateSums` that are maxima instead of sums."""


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Statistics of one optimizer step, over all ranks.

    Attributes:
        loss: Σ weight · (surrogate + penalty), minus the entropy bonus and the expected scores.
        entropy: mean over the computed tokens, nats.
        bonus_entropy: mean over the tokens of the entropy bonus, nats; None without a bonus.
        kl: mean of k3 = r - 1 - log r between the old policy (the ratio's denominator) and the
            current one, nats.
        kl_loss: mean KL from the reference with the penalty's estimator, weighted like the loss,
            nats; None without a penalty.
        expected_score: mean expected score of the stated confidences; None without any.
        stated_mass: mean probability that a confidence is one of the task's values.
        clip_fraction: fraction of computed tokens that the surrogate clips (by their or their row's
            ratio), or a mask leaves out.
        ratio_max: largest importance ratio in the loss, of a token or of a row.
        token_ratio_max: largest token ratio, even if the loss uses sequence ratios.
        grad_norm: gradient norm before clipping.
        computed_tokens: packed tokens, without padding.
        row_tokens: tokens of the rows they represent.
    """

    loss: float
    entropy: float
    bonus_entropy: float | None
    kl: float
    kl_loss: float | None
    expected_score: float | None
    stated_mass: float | None
    clip_fraction: float
    ratio_max: float
    token_ratio_max: float
    grad_norm: float
    learning_rate: float
    computed_tokens: int
    row_tokens: int


@dataclass(frozen=True, eq=False, slots=True)
class UpdateTargets:
    """Values of the step's batch at the `[M]` targets of a micro-batch.

    With sequence ratios, all learning tokens of a row with an advantage are included, and
    micro-batches do not split rows.

    Attributes:
        rows: rows of the step's batch.
        old: old log-probabilities (the ratio's denominator), nats.
        bonus: weights of the entropy bonus.
        reference: reference log-probabilities, nats; None without a penalty.
        covariant: tokens to which `loss.covariance` applies; None if off.
    """

    rows: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    bonus: Tensor
    reference: Tensor | None
    covariant: Tensor | None = None

    @classmethod
    def from_packed(
        cls, packed: PackedBatch, train: TrainBatch, spec: LossSpec, bonus_scale: float = 1.0
    ) -> "UpdateTargets":
        """Looks up the targets of a micro-batch; `bonus_scale` multiplies the entropy bonus.

        Raises:
            ValueError: the spec has a KL penalty but the batch has no reference log-probabilities.
        """
        reference = None
        if spec.kl is not None:
            logprobs = train.streams.get("reference_logprobs")
            if logprobs is None:
                raise ValueError("loss.kl needs the stream reference_logprobs")
            reference = packed.gather_targets(logprobs)
        return cls(
            rows=copy_to(packed.rows, packed.targets.device),
            old=packed.gather_targets(train.streams.old_logprobs),
            advantages=packed.gather_targets(train.advantages),
            weights=packed.gather_targets(train.weights),
            bonus=bonus_scale * packed.gather_targets(train.entropy_weights),
            reference=reference,
            covariant=None if train.covariant is None else packed.gather_targets(train.covariant),
        )


class UpdateSums:
    """Running sums (or maxima: `LARGEST`) of one step's statistics, over micro-batches and
    ranks."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[str, ...], Tensor]] = []
        self.totals: dict[str, float] = defaultdict(float)

    def keep(self, **figures: Tensor) -> None:
        """Keeps `[]` figures of a micro-batch where they were computed."""
        values = torch.stack([figure.detach().double() for figure in figures.values()])
        self._kept.append((tuple(figures), values))

    def read_kept(self) -> None:
        """Adds what was kept; the host waits for a device only here. Exact in float64."""
        names = [name for group, _ in self._kept for name in group]
        values = torch.cat([values for _, values in self._kept]).tolist() if names else []
        for name, value in zip(names, values, strict=True):
            self._add(name, value)
        self._kept.clear()

    def _add(self, name: str, value: float) -> None:
        so_far = self.totals[name]
        self.totals[name] = max(so_far, value) if name in LARGEST else so_far + value

    @staticmethod
    def sum_over_ranks(parts: "list[UpdateSums]") -> "UpdateSums":
        whole = UpdateSums()
        for part in parts:
            for name, value in part.totals.items():
                whole._add(name, value)
        return whole

    def stats(
        self, *, grad_norm: float, learning_rate: float, computed_tokens: int, row_tokens: int
    ) -> UpdateStats:
        """Converts sums to means."""
        totals, count = self.totals, max(self.totals["tokens"], 1)

        def divide(name: str, by: str) -> float | None:
            return totals[name] / totals[by] if totals[by] else None

        return UpdateStats(
            loss=totals["loss"],
            entropy=totals["entropy"] / count,
            bonus_entropy=divide("bonus_entropy", "bonus_tokens"),
            kl=totals["kl"] / count,
            kl_loss=divide("kl_loss", "kl_weight"),
            expected_score=divide("expected_score", "confidences"),
            stated_mass=divide("stated_mass", "confidences"),
            clip_fraction=totals["clipped"] / count,
            ratio_max=totals["ratio_max"],
            token_ratio_max=totals["token_ratio_max"],
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            computed_tokens=computed_tokens,
            row_tokens=row_tokens,
        )


def policy_term(
    logprobs: Tensor, entropy: Tensor, targets: UpdateTargets, spec: LossSpec, sums: UpdateSums
) -> Tensor:
    """Computes Σ weight · (surrogate + penalty) - Σ bonus · entropy over a micro-batch's targets.

    `logprobs` and `entropy` are `[M]` nats under the policy being trained. A filler micro-batch has
    no targets; its empty sum has a zero gradient, so that every rank runs every backward pass.
    """
    surrogate = compute_token_losses(
        logprobs, targets.old, targets.advantages, targets.rows, spec, targets.covariant
    )
    losses = surrogate.losses
    if spec.kl is not None and targets.reference is not None:
        penalty = kl_terms(logprobs, targets.reference, spec.kl.kl_penalty)
        losses = losses + spec.kl.coefficient * penalty
        sums.keep(
            kl_loss=(targets.weights * penalty.detach()).sum(), kl_weight=targets.weights.sum()
        )
    term: Tensor = (targets.weights * losses).sum() - (targets.bonus * entropy).sum()
    sums.keep(loss=term)
    if not len(logprobs):
        return term
    with torch.no_grad():
        token_log_ratio = logprobs - targets.old
        ratio, kept_open = surrogate.log_ratio.exp(), targets.bonus != 0
        sums.totals["tokens"] += len(ratio)
        sums.keep(
            kl=(token_log_ratio.expm1() - token_log_ratio).sum(),
            clipped=surrogate.held.sum(),
            entropy=entropy.sum(),
            bonus_entropy=torch.where(kept_open, entropy, 0.0).sum(),
            bonus_tokens=kept_open.sum(),
            ratio_max=ratio.max(),
            token_ratio_max=token_log_ratio.exp().max(),
        )
    return term


def expected_score_term(
    logprobs: Tensor, packed: PackedBatch, confidences: ConfidenceBranches, sums: UpdateSums
) -> Tensor:
    """Computes `rlx.loss.compute_expected_score_loss` over a micro-batch's branches.

    `logprobs` are `[K]` nats of the branches' tokens; a branch is never split. Without branches the
    result, `[]`, has a zero gradient.
    """
    numbers, slots = packed.branches.numbers.unique(return_inverse=True)
    whole = sum_by_slot(logprobs, copy_to(slots, logprobs.device), len(numbers))
    scores, weights = (
        copy_to(values[numbers], whole.device)
        for values in (confidences.scores, confidences.weights)
    )
    term = compute_expected_score_loss(whole, scores, weights)
    mass = whole.detach().exp()
    sums.keep(loss=term, expected_score=(mass * scores).sum(), stated_mass=mass.sum())
    sums.totals["confidences"] += len(numbers) / confidences.values
    return term


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of a phase of `steps` steps."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    fall = progress if spec.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return spec.learning_rate * (1 + (spec.final_fraction - 1) * fall)


class Learner:
    """Owns the trained weights and their optimizer.

    Args:
        policy: the model to train; moved to the rank's device. Parameters without `requires_grad`,
            such as the base weights of adapters, are frozen.
        optimizer: settings of the first phase.

    Attributes:
        chosen: how packed rows are computed, and why.
    """

    def __init__(
        self,
        policy: Policy,
        runner: RunnerSpec,
        optimizer: OptimizerSpec,
        ranks: Ranks,
    ) -> None:
        self._runner = runner
        self._ranks = ranks
        self.model = policy.model
        self._dialogue = policy.dialogue
        self._peak_rate = optimizer.learning_rate
        module = PackedPolicy(policy.model.eval())
        if runner.activation_checkpointing:
            module.recompute_layers()
        chosen = choose_form(module, ranks)
        self.chosen = replace(chosen, logits=choose_logits(module, runner, ranks))
        self.engine = TrainingEngine(module, optimizer, runner, ranks, section="optimizer")

    def begin_phase(self, optimizer: OptimizerSpec, *, fresh: bool) -> None:
        """Applies a phase's optimizer settings; `fresh` resets Adam's moments."""
        self._peak_rate = optimizer.learning_rate
        self.engine.begin_phase(optimizer, fresh=fresh)

    def update(self, train: TrainBatch, loss: LossSpec, rate: float) -> UpdateStats | None:
        """Takes one optimizer step on a batch that is the same on every rank.

        Returns:
            Statistics, the same on every rank; None if no token carries a signal, in which case no
                rank is updated.

        Raises:
            RlxError: the gradient is not finite.
            SpecError: the tokenizer cannot state the confidences of `loss.expected`.
            ValueError: the loss has a KL penalty but the batch has no reference log-probabilities.
        """
        confidences = None
        if train.expected is not None and loss.expected is not None:
            values, span = train.expected.values, loss.expected.span
            tokens = encode_confidences(values, span, self._dialogue)
            confidences = build_confidence_branches(train, tokens)
        branches = None if confidences is None else confidences.branches
        share = self._share(train.batch, train.wanted, branches)
        if not share:
            return None
        sums = UpdateSums()
        falls = loss.entropy is not None and loss.entropy.schedule == "learning_rate"
        bonus_scale = rate / self._peak_rate if falls else 1.0

        def compute_policy_loss(packed: PackedBatch) -> Tensor:
            temperatures = train.batch.temperatures
            starts = None
            if confidences is not None:
                starts = packed.branches.gather_starts(temperatures)
            logprobs, entropy, *branches = self.engine(
                packed,
                packed.gather_targets(temperatures),
                starts,
                learns_entropy=loss.entropy is not None,
            )
            targets = UpdateTargets.from_packed(packed, train, loss, bonus_scale)
            term = policy_term(logprobs, entropy, targets, loss, sums)
            if confidences is not None:
                term = term + expected_score_term(branches[0], packed, confidences, sums)
            return term

        norm = self.engine.step(share, compute_policy_loss, rate)
        sums.read_kept()
        return UpdateSums.sum_over_ranks(self._ranks.gather(sums)).stats(
            grad_norm=norm,
            learning_rate=rate,
            computed_tokens=share.computed_tokens,
            row_tokens=share.row_tokens,
        )

    def _share(
        self, batch: TokenBatch, want: Tensor, branches: Branches | None = None
    ) -> RankMicroBatches:
        limit, merge = self._runner.micro_batch_tokens, self.chosen.form.merges
        return RankMicroBatches(batch, want, limit, self._ranks, merge=merge, branches=branches)

    def logprobs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """Computes log-probabilities of tokens under the current policy, at the sampler's
        temperatures.

        Args:
            batch: all rows of the step, the same on every rank.
            want: `[B, T]` bool, the tokens to compute; never the first of a row.

        Returns:
            `[B, T]` nats, on every rank; 0 where not wanted.
        """
        ask = build_logprob_function(self.engine, batch)
        return self._share(batch, want).gather_token_values(ask)

    def collision_probs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """Computes Σ π² of the distributions from which tokens are drawn, like `logprobs`."""

        def compute_collision_probs(packed: PackedBatch) -> Tensor:
            temperatures = packed.gather_targets(batch.temperatures)
            return torch.as_tensor(self.engine(packed, temperatures, with_collisions=True)[2])

        return self._share(batch, want).gather_token_values(compute_collision_probs)

    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full weights under the plain model's names, adapters merged; every rank must take
        all.

        Under ZeRO stage 3 each is gathered when it is due, so that the device holds one at a time.
        """
        return iterate_merged_weights(self.model, self.engine.gather_parameter)

    def adapter(self) -> Mapping[str, Tensor]:
        """Returns A and B of every adapted layer under peft's checkpoint names, on every rank."""
        return adapter_weights(self.model, self.engine.gather_parameter)

    def export(self, policy: Policy, folder: Path) -> None:
        """Writes weights, and an adapter also separately, as `write_model` does, atomically, from
        rank 0."""
        weights = {n: w.cpu() for n, w in self.iterate_weights() if self._ranks.is_first}
        adapter = self.adapter()
        if self._ranks.is_first:
            aside = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(aside, ignore_errors=True)
            write_model(policy, weights, adapter, aside)
            shutil.rmtree(folder, ignore_errors=True)
            aside.replace(folder)
        self._ranks.barrier()


def build_logprob_function(
    module: Callable[..., Sequence[Tensor]], batch: TokenBatch
) -> Callable[[PackedBatch], Tensor]:
    return lambda packed: module(packed, packed.gather_targets(batch.temperatures))[0]
