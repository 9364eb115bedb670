"""The critic: a copy of the policy's model with a value head, trained by its own engine."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlx.batch import TokenBatch
from rlx.errors import SpecError
from rlx.learner.distributed import Ranks
from rlx.learner.forward import PackedValues, choose_form
from rlx.learner.learner import TrainingEngine
from rlx.learner.pack import PackedBatch, RankMicroBatches
from rlx.loss import value_loss
from rlx.model import Policy, copy_model, keep_first_layers, share_model
from rlx.seeding import derive_seed
from rlx.spec import CriticSpec, RunnerSpec
from rlx.step import TrainBatch


@dataclass(frozen=True, slots=True)
class CriticStats:
    """Statistics of one optimizer step of the critic, over all ranks, from before the update.

    Attributes:
        loss: mean over the learning tokens.
        clip_fraction: fraction of learning tokens whose value is clipped, without a gradient.
        value: mean value.
        explained_variance: 1 - Var(R - V) / Var(R); None if all returns are equal.
        grad_norm: gradient norm before clipping.
    """

    loss: float
    clip_fraction: float
    value: float
    explained_variance: float | None
    grad_norm: float
    learning_rate: float


def critic_rate(spec: CriticSpec, step: int) -> float:
    """The learning rate of step `step` (from 0) of the run: linear warm-up, then constant."""
    return spec.learning_rate * min(1.0, (step + 1) / max(1, spec.warmup_steps))


class Critic:
    """Value model that estimates the remaining return. All weights are trained, even with LoRA.

    The policy is the initial model, before adapters are added and a learner is built.

    Raises:
        SpecError: this kind of model has no decoder for a value head.
    """

    def __init__(
        self,
        policy: Policy,
        runner: RunnerSpec,
        spec: CriticSpec,
        ranks: Ranks,
        seed: int,
    ) -> None:
        self._clip = spec.value_clip
        self._limit = runner.micro_batch_tokens
        self._ranks = ranks
        decoder = _share_decoder(policy)
        module = PackedValues(decoder, _compute_hidden_size(decoder), derive_seed(seed, "critic"))
        if runner.zero_stage < 3:  # which would copy each rank's part of the shared weights
            module = copy_model(module, ranks.device)
        if runner.activation_checkpointing:
            module.recompute_layers()
        self._merges = choose_form(module, ranks).form.merges
        self.engine = TrainingEngine(module, spec, runner, ranks, section="critic")

    def values(self, batch: TokenBatch, want: Tensor) -> Tensor:
        """Computes, like `Learner.logprobs`, the current value of the state before each token."""
        return self._share(batch, want).gather_token_values(self.engine)

    def _share(self, batch: TokenBatch, want: Tensor) -> RankMicroBatches:
        return RankMicroBatches(batch, want, self._limit, self._ranks, merge=self._merges)

    def update(self, train: TrainBatch, rate: float) -> CriticStats | None:
        """Takes one optimizer step towards the returns of a batch that is the same on every rank.

        Returns:
            Statistics, the same on every rank; None if there are no learning tokens, in which case
                no rank is updated.

        Raises:
            RlxError: the gradient is not finite.
            ValueError: the spec has a clip and the batch no values.
        """
        share = self._share(train.batch, train.mask)
        if not share:
            return None
        tokens = int(train.mask.sum())
        sums = torch.zeros(5, dtype=torch.float64, device=self._ranks.device)

        def compute_value_loss(packed: PackedBatch) -> Tensor:
            values, returns = self.engine(packed), packed.gather_targets(train.returns)
            old = train.streams.get("values")
            near = None if old is None else packed.gather_targets(old)
            losses = value_loss(values, near, returns, clip=self._clip)
            with torch.no_grad():
                held = losses > value_loss(values, None, returns, clip=None)
                errors = (returns - values).double()
                noted = (losses, held, values, errors, errors.square())
                sums.add_(torch.stack([x.double().sum() for x in noted]))
            return losses.sum() / tokens

        norm = self.engine.step(share, compute_value_loss, rate)
        loss, held, value, error, square = (
            torch.stack(self._ranks.gather(sums.cpu())).sum(dim=0) / tokens
        ).tolist()
        returns = train.returns[train.mask]
        variance = float(returns.double().var(correction=0))
        return CriticStats(
            loss=loss,
            clip_fraction=held,
            value=value,
            explained_variance=None
            if returns.max() == returns.min()
            else 1 - (square - error**2) / variance,
            grad_norm=norm,
            learning_rate=rate,
        )


def _share_decoder(policy: Policy) -> PreTrainedModel:
    """Returns the model without its head, trainable, as a second module with the same weights."""
    decoder: PreTrainedModel | None = policy.model.get_decoder()
    if decoder is None or decoder is policy.model:
        kind = policy.model.config.model_type
        raise SpecError(
            f"critic: a model of kind {kind!r} has no separate decoder that could take a value "
            "head; choose an estimator that needs no critic, or another model"
        )
    return share_model(decoder).requires_grad_().eval()


@torch.no_grad()
def _compute_hidden_size(decoder: PreTrainedModel) -> int:
    """Returns the size of the last hidden state by a forward pass: configurations have no common
    name for it."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=decoder.device)
    with keep_first_layers(decoder):
        return int(decoder(input_ids=token, use_cache=False).last_hidden_state.shape[-1])
