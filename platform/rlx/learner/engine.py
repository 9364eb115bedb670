"""The DeepSpeed learner: one optimiser step per call, however the batch is cut."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from rlx.errors import RlxError
from rlx.learner.distributed import Ranks
from rlx.learner.forward import PackedPolicy
from rlx.learner.pack import PackedBatch, PackedTree, collate, deal, pack, wanted
from rlx.loss import clipped_surrogate
from rlx.model import Policy
from rlx.model.lora import adapter_weights, merged_weights, save_adapter
from rlx.spec import LossSpec, OptimizerSpec, RunnerSpec
from rlx.step import TrainBatch

__all__ = ["Learner", "UpdateStats", "learning_rate"]

MakeOptimizer = Callable[[Iterable[nn.Parameter], OptimizerSpec], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one optimiser step did, over all ranks.

    Attributes:
        loss: Σ weight · token loss, minus the entropy bonus.
        entropy: mean over the computed tokens, nats.
        bonus_entropy: mean over the tokens of the entropy bonus, nats; None without one.
        kl: mean of k3 = r - 1 - log r between sampling and learning policy, nats.
        clip_fraction: share of computed tokens at which the clipped branch is active.
        ratio_max: largest importance ratio.
        grad_norm: before clipping.
        learning_rate: as used.
        computed_tokens: packed tokens, padding left out.
        row_tokens: tokens of the rows they stand for.
    """

    loss: float
    entropy: float
    bonus_entropy: float | None
    kl: float
    clip_fraction: float
    ratio_max: float
    grad_norm: float
    learning_rate: float
    computed_tokens: int
    row_tokens: int


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of a phase of `steps`."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    fall = progress if spec.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return spec.learning_rate * (1 + (spec.final_fraction - 1) * fall)


def adamw(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """The optimiser that the spec describes."""
    return torch.optim.AdamW(
        parameters,
        lr=spec.learning_rate,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
    )


class Learner:
    """Owns the trained weights and their optimiser.

    Args:
        policy: the model to train; moved to the rank's device. Parameters that need no gradient,
            such as those below adapters, stay as they are.
        runner: ZeRO stage, precision, micro-batch size.
        optimizer: of the first phase.
        ranks: from `join_ranks`.
        make_optimizer: another than AdamW, for measurements.
    """

    def __init__(
        self,
        policy: Policy,
        runner: RunnerSpec,
        optimizer: OptimizerSpec,
        ranks: Ranks,
        make_optimizer: MakeOptimizer = adamw,
    ) -> None:
        self._runner = runner
        self._ranks = ranks
        self._module = PackedPolicy(policy.model.to(ranks.device))
        self._module.zero_grad()  # whatever the model learned before is not this engine's
        learned = [p for p in self._module.parameters() if p.requires_grad]
        self._engine, *_ = deepspeed.initialize(
            model=self._module,
            optimizer=make_optimizer(learned, optimizer),
            config=_config(runner, optimizer, ranks),
            dist_init_required=False,
        )
        # No dropout: the gradient is that of the very policy that sampled.
        self._module.eval()
        self._optimizer = optimizer

    def begin_phase(self, optimizer: OptimizerSpec, *, fresh: bool) -> None:
        """Takes over a phase's optimiser settings; `fresh` empties Adam's moments."""
        self._optimizer = optimizer
        if fresh:
            self._base_optimizer.state.clear()
        # ZeRO's wrappers keep a bound of their own; stage 0 reads the configuration at every step.
        self._engine._config.gradient_clipping = optimizer.max_grad_norm
        if hasattr(self._engine.optimizer, "clip_grad"):
            self._engine.optimizer.clip_grad = optimizer.max_grad_norm
        for group in self._engine.optimizer.param_groups:
            group.update(
                betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
            )

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        """AdamW itself, inside DeepSpeed's ZeRO wrapper where there is one."""
        outer = self._engine.optimizer
        inner: torch.optim.Optimizer = getattr(outer, "optimizer", outer)
        return inner

    def update(
        self, train: TrainBatch, old_logprobs: Tensor, loss: LossSpec, rate: float
    ) -> UpdateStats | None:
        """Takes one optimiser step.

        Args:
            train: the whole step's batch, alike on every rank.
            old_logprobs: `[B, T]` nats, the ratio's denominator.
            loss: surrogate and bonus.
            rate: learning rate of this step.

        Returns:
            The figures, alike on every rank; None when no token carries a signal, in which case
            nothing was changed on any rank.

        Raises:
            RlxError: the gradient is not finite.
        """
        batch = train.batch
        trees = self._pack(train)
        if not trees:
            return None
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        shares = deal(trees, self._ranks.count, self._runner.micro_batch_tokens)
        mine = shares[self._ranks.rank]
        sums = _Sums()
        for number, share in enumerate(mine):
            self._engine.set_gradient_accumulation_boundary(number == len(mine) - 1)
            packed = _to(collate(share, batch.token_ids), self._ranks.device)
            term = self._loss(packed, train, old_logprobs, loss, sums)
            # DeepSpeed averages over ranks; weights are global, so ranks must add.
            self._engine.backward(term * self._ranks.count)
        norm = self._step()
        if not math.isfinite(norm):
            raise RlxError(
                "the gradient is not finite: lower optimizer.learning_rate, or look for extreme "
                "rewards with `rlx samples RUN --sort reward`"
            )
        total = _Sums.add(self._ranks.gather(sums))
        return total.stats(
            grad_norm=norm,
            learning_rate=rate,
            computed_tokens=sum(map(len, trees)),
            row_tokens=int(batch.is_token[wanted(train).any(dim=1)].sum()),
        )

    def _pack(self, train: TrainBatch) -> list[PackedTree]:
        """The packed trees of the whole step, the same on every rank."""
        batch, limit = train.batch, self._runner.micro_batch_tokens
        return pack(batch.token_ids, batch.is_token, batch.tree_ids, wanted(train), limit)

    def _step(self) -> float:
        """Lets the optimiser step; returns the gradient's norm before clipping."""
        if self._runner.zero_stage > 0 or self._runner.dtype != "float32":
            self._engine.step()
            return float(self._engine.get_global_grad_norm())
        # Plain data parallelism: gradients are whole and averaged by now, and DeepSpeed will clip
        # them without saying by how much.
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._engine.step()
        return float(norm)

    def _loss(
        self,
        packed: PackedBatch,
        train: TrainBatch,
        old_logprobs: Tensor,
        spec: LossSpec,
        sums: "_Sums",
    ) -> Tensor:
        at = packed.rows.cpu(), packed.columns.cpu()
        device = self._ranks.device
        logprobs, entropy = self._engine(packed, train.batch.temperatures[at].to(device))
        old, advantages, weights, bonus = (
            tensor[at].to(device)
            for tensor in (old_logprobs, train.advantages, train.weights, train.entropy_weights)
        )
        surrogate = clipped_surrogate(
            logprobs, old, advantages, clip=spec.clip, dual_clip=spec.dual_clip
        )
        # A filler has no targets; its sum over nothing still carries a gradient of zeros, so that
        # every rank runs every backward.
        term: Tensor = (weights * surrogate).sum() - (bonus * entropy).sum()
        sums.note(logprobs.detach(), old, advantages, entropy.detach(), bonus, term.detach(), spec)
        return term

    @torch.no_grad()
    def logprobs(self, train: TrainBatch) -> Tensor:
        """`[B, T]` log-probabilities, nats, of the tokens that enter the loss; 0 elsewhere."""
        batch = train.batch
        trees = self._pack(train)
        result = torch.zeros_like(batch.behaviour_logprobs)
        shares = deal(trees, self._ranks.count, self._runner.micro_batch_tokens) if trees else []
        for share in shares[self._ranks.rank] if shares else []:
            packed = _to(collate(share, batch.token_ids), self._ranks.device)
            at = packed.rows.cpu(), packed.columns.cpu()
            heat = batch.temperatures[at].to(self._ranks.device)
            result[at] = self._engine(packed, heat)[0].float().cpu()
        return torch.stack(self._ranks.gather(result)).sum(dim=0)

    def weights(self) -> Mapping[str, Tensor]:
        """Whole weights by the plain model's parameter names, adapters merged, on every rank."""
        return merged_weights(self._module.model, self._whole)

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if self._runner.zero_stage < 3:
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            return parameter.detach().clone()

    def export(self, policy: Policy, folder: Path) -> None:
        """Writes the weights in the Hugging Face layout, from rank 0, whole or not at all.

        An adapted model is written merged, and its adapter once more alone, in peft's format, as
        the subfolder `adapter`.
        """
        weights, adapter = self.weights(), adapter_weights(self._module.model, self._whole)
        if self._ranks.is_first:
            aside = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(aside, ignore_errors=True)
            policy.model.save_pretrained(aside, state_dict=dict(weights))
            policy.tokenizer.save_pretrained(aside)
            if adapter:
                save_adapter(self._module.model, adapter, aside / "adapter")
            shutil.rmtree(folder, ignore_errors=True)
            aside.replace(folder)
        self._ranks.barrier()


def _config(runner: RunnerSpec, optimizer: OptimizerSpec, ranks: Ranks) -> dict[str, Any]:
    """DeepSpeed's own configuration. Accumulation is ours: boundaries are set explicitly."""
    # Micro-batches of a bfloat16 model would be added in bfloat16; stage 0 knows no other way.
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if runner.zero_stage else {}
    return {
        **sums,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": ranks.count,
        "gradient_clipping": optimizer.max_grad_norm,
        "zero_optimization": {"stage": runner.zero_stage},
        "bf16": {"enabled": runner.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _to(packed: PackedBatch, device: torch.device) -> PackedBatch:
    if device.type == "cpu":
        return packed
    return PackedBatch(**{name: getattr(packed, name).to(device) for name in PackedBatch.__slots__})


class _Sums:
    """Running sums of one step's figures, added over micro-batches and ranks."""

    def __init__(self) -> None:
        self.loss = self.entropy = self.bonus_entropy = self.kl = self.clipped = 0.0
        self.tokens = self.bonus_tokens = 0
        self.ratio_max = 0.0

    def note(
        self,
        logprobs: Tensor,
        old: Tensor,
        advantages: Tensor,
        entropy: Tensor,
        bonus: Tensor,
        loss: Tensor,
        spec: LossSpec,
    ) -> None:
        """Adds one micro-batch of `[M]` tokens."""
        self.loss += float(loss)
        if not len(logprobs):
            return
        log_ratio = logprobs - old
        ratio = log_ratio.exp()
        low, high = spec.clip
        clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
        self.kl += float((ratio - 1 - log_ratio).sum())
        self.clipped += float(clipped.sum())
        self.entropy += float(entropy.sum())
        self.bonus_entropy += float(entropy[bonus != 0].sum())
        self.tokens += len(logprobs)
        self.bonus_tokens += int((bonus != 0).sum())
        self.ratio_max = max(self.ratio_max, float(ratio.max()))

    @staticmethod
    def add(parts: "list[_Sums]") -> "_Sums":
        """Sums over ranks."""
        total = _Sums()
        for name in vars(total):
            values = [getattr(part, name) for part in parts]
            setattr(total, name, max(values) if name == "ratio_max" else sum(values))
        return total

    def stats(
        self, *, grad_norm: float, learning_rate: float, computed_tokens: int, row_tokens: int
    ) -> UpdateStats:
        """Sums to means."""
        count = max(self.tokens, 1)
        return UpdateStats(
            loss=self.loss,
            entropy=self.entropy / count,
            bonus_entropy=self.bonus_entropy / self.bonus_tokens if self.bonus_tokens else None,
            kl=self.kl / count,
            clip_fraction=self.clipped / count,
            ratio_max=self.ratio_max,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            computed_tokens=computed_tokens,
            row_tokens=row_tokens,
        )
