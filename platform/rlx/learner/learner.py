"""The learner: the trained policy, its update, its log-probabilities and its weights."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.learner.choice import choose_form
from rlx.learner.distributed import Ranks
from rlx.learner.engine import MakeOptimizer, TrainingEngine, build_adamw
from rlx.learner.forward import PackedPolicy
from rlx.learner.pack import PackedBatch
from rlx.learner.share import RankMicroBatches
from rlx.learner.terms import UpdateStats, UpdateSums, UpdateTargets, policy_term
from rlx.model import Policy, adapter_weights, disable_adapters, merged_weights, save_adapter
from rlx.spec import LossSpec, OptimizerSpec, RunnerSpec
from rlx.step import TrainBatch

__all__ = ["Learner", "learning_rate", "write_model"]


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of a phase of `steps`."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    fall = progress if spec.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return spec.learning_rate * (1 + (spec.final_fraction - 1) * fall)


class Learner:
    """Owns the trained weights and their optimiser.

    Args:
        policy: the model to train; moved to the rank's device. Parameters that need no gradient,
            such as those below adapters, stay as they are.
        runner: ZeRO stage, precision, micro-batch size.
        optimizer: of the first phase.
        ranks: from `join_ranks`.
        make_optimizer: another than AdamW, for measurements.

    Attributes:
        chosen: how packed trees are computed, and why.
    """

    def __init__(
        self,
        policy: Policy,
        runner: RunnerSpec,
        optimizer: OptimizerSpec,
        ranks: Ranks,
        make_optimizer: MakeOptimizer = build_adamw,
    ) -> None:
        self._runner = runner
        self._ranks = ranks
        self._model = policy.model
        module = PackedPolicy(policy.model.eval()).to(ranks.device)
        if runner.activation_checkpointing:
            module.recompute_layers()
        self.chosen = choose_form(module, ranks)
        self._engine = TrainingEngine(
            module,
            optimizer,
            runner,
            ranks,
            section="optimizer",
            make_optimizer=make_optimizer,
        )

    def begin_phase(self, optimizer: OptimizerSpec, *, fresh: bool) -> None:
        """Takes over a phase's optimiser settings; `fresh` empties Adam's moments."""
        self._engine.begin_phase(optimizer, fresh=fresh)

    def save(self, folder: Path) -> None:
        """As `Engine.save`."""
        self._engine.save(folder)

    def load(self, folder: Path, *, universal: bool = False) -> None:
        """As `Engine.load`."""
        self._engine.load(folder, universal=universal)

    def update(self, train: TrainBatch, loss: LossSpec, rate: float) -> UpdateStats | None:
        """Takes one optimiser step.

        Args:
            train: the whole step's batch, alike on every rank.
            loss: ratio, surrogate and penalty.
            rate: learning rate of this step.

        Returns:
            The figures, alike on every rank; None when no token carries a signal, in which case
            nothing was changed on any rank.

        Raises:
            RlxError: the gradient is not finite.
            ValueError: the loss has a penalty and the batch no reference.
        """
        share = self._share(train.batch, train.wanted)
        if not share:
            return None
        sums = UpdateSums()

        def compute_policy_loss(packed: PackedBatch) -> Tensor:
            logprobs, entropy = self._engine(
                packed, packed.gather_targets(train.batch.temperatures)
            )
            return policy_term(
                logprobs, entropy, UpdateTargets.from_packed(packed, train, loss), loss, sums
            )

        norm = self._engine.step(share, compute_policy_loss, rate)
        return UpdateSums.sum_over_ranks(self._ranks.gather(sums)).stats(
            grad_norm=norm,
            learning_rate=rate,
            computed_tokens=share.computed_tokens,
            row_tokens=share.row_tokens,
        )

    def _share(self, batch: TokenBatch, want: Tensor) -> RankMicroBatches:
        limit = self._runner.micro_batch_tokens
        return RankMicroBatches(batch, want, limit, self._ranks, merge=self.chosen.form.merges)

    def logprobs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """Log-probabilities of chosen tokens under the policy as it is.

        Args:
            batch: the whole step's rows, alike on every rank.
            want: `[B, T]` bool the tokens; never the first of a row.

        Returns:
            `[B, T]` nats at the sampler's temperatures, on every rank; 0 where not wanted.
        """

        def compute_logprobs(packed: PackedBatch) -> Tensor:
            return torch.as_tensor(
                self._engine(packed, packed.gather_targets(batch.temperatures))[0]
            )

        return self._share(batch, want).gather_token_values(compute_logprobs)

    def reference_logprobs(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """As `logprobs`, of the model that adapters were laid over.

        Of a model without adapters, that is the policy itself.
        """
        with disable_adapters(self._model):
            return self.logprobs(batch, want)

    def weights(self) -> Mapping[str, Tensor]:
        """Whole weights by the plain model's parameter names, adapters merged, on every rank."""
        return merged_weights(self._model, self._engine.gather_parameter)

    def export(self, policy: Policy, folder: Path) -> None:
        """Writes the weights in the Hugging Face layout, from rank 0, whole or not at all.

        An adapted model is written merged, and its adapter once more alone; see `write_model`.
        """
        weights, adapter = (
            self.weights(),
            adapter_weights(self._model, self._engine.gather_parameter),
        )
        if self._ranks.is_first:
            aside = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(aside, ignore_errors=True)
            write_model(policy, weights, adapter, aside)
            shutil.rmtree(folder, ignore_errors=True)
            aside.replace(folder)
        self._ranks.barrier()


def write_model(
    policy: Policy, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], folder: Path
) -> None:
    """Writes weights, configuration and tokenizer in the Hugging Face layout.

    Args:
        policy: adapted where the one that was trained is.
        weights: from `merged_weights`.
        adapter: from `adapter_weights`; written in peft's format as the subfolder `adapter`,
            unless there is none.
        folder: made where it is missing.
    """
    policy.model.save_pretrained(folder, state_dict=dict(weights))
    policy.tokenizer.save_pretrained(folder)
    if adapter:
        save_adapter(policy.model, adapter, folder / "adapter")
