"""DeepSpeed engine for one module: one optimizer step per call, over any number of
micro-batches."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rlx.errors import RlxError
from rlx.importing import hide_packages
from rlx.learner.distributed import Ranks
from rlx.learner.pack import PackedBatch, RankMicroBatches
from rlx.model import convert_weights
from rlx.spec import CriticSpec, OptimizerSpec, RunnerSpec

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

        Args:
            share: this rank's micro-batches, at least one.
            term: computes a micro-batch's part of the loss, `[]`, already divided by the
                denominators of the whole step.

        Returns:
            The global gradient norm before clipping, the same on every rank.

        Raises:
            RlxError: the gradient norm is not finite.
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
