"""What an experiment may say about optimisation, devices, sampling engines and records."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rlx.spec.base import Betas, StrictModel
from rlx.spec.launcher import LauncherSpec, LocalLauncherSpec, SlurmLauncherSpec
from rlx.text import redact_passwords

__all__ = [
    "CheckpointSpec",
    "CriticSpec",
    "EvaluationSpec",
    "OptimizerSpec",
    "PhaseSpec",
    "RunnerSpec",
    "SamplerSpec",
    "TrackingSpec",
    "TransformersSamplerSpec",
    "VllmSamplerSpec",
]


class OptimizerSpec(StrictModel):
    """AdamW and its learning-rate schedule, which runs over the steps of one phase."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    final_fraction: float = Field(0.0, ge=0, le=1)
    """What a linear or cosine schedule ends at, as a share of the peak."""
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    updates_per_rollout: int = Field(1, ge=1)
    """Optimiser steps taken on each batch of rollouts."""


class CriticSpec(StrictModel):
    """A copy of the model with a value head, trained by an engine of its own."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak; constant after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    updates_per_rollout: int = Field(1, ge=1)
    """Optimiser steps of the critic on each batch of rollouts."""
    value_clip: float | None = Field(0.5, gt=0)
    """A new value counts as no further than this from the one it was sampled with; null: freely."""
    lead_steps: int = Field(0, ge=0)
    """Of the steps that have a critic, the first in which it learns and the policy does not."""


class PhaseSpec(StrictModel):
    """A stretch of training with settings of its own. Phases share the data cursor."""

    name: str = Field(min_length=1)
    steps: int = Field(ge=1)
    set: dict[str, Any] = Field(default_factory=dict)
    """`path.to.key: value`, laid over the experiment for this phase."""
    fresh_optimizer: bool = True
    """Start with empty moments; false carries them over from the phase before."""


class CheckpointSpec(StrictModel):
    """When all that the next step needs is written down."""

    every: int = Field(10, ge=0)
    """Steps between checkpoints; the last step has one too. 0: only where the run is stopped."""
    keep: int = Field(2, ge=1)
    """The newest that stay; an older one is needed where the newest is damaged."""


class RunnerSpec(StrictModel):
    """Where and how the learner runs."""

    engine: Literal["deepspeed"] = "deepspeed"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: int = Field(1, ge=1)
    launcher: LauncherSpec = LocalLauncherSpec.model_construct()
    """Which machines the ranks run on."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Packed tokens per rank and backward pass."""
    activation_checkpointing: bool = False
    """Keep only what enters each layer and compute the rest again in the backward pass: less
    memory, about a third more time."""
    offload_optimizer: bool = False
    """Keep Adam's moments and the master weights in the host's memory, and step there."""
    threads: int = Field(1, ge=1)
    """CPU threads per rank."""
    reward_workers: int = Field(1, ge=1)
    """Scoring processes per rank."""
    checkpoint: CheckpointSpec = CheckpointSpec.model_construct()
    max_attempts: int = Field(3, ge=1)
    """How often a run is started: one whose process was killed goes on from its checkpoint."""
    hang_after: float = Field(3600.0, gt=0)
    """Seconds without any progress after which an attempt is ended."""
    reward_memory_mb: int = Field(1024, ge=64)
    """Address space that a scoring process may take beyond what it starts with."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        return self

    @model_validator(mode="after")
    def _nodes_fit(self) -> Self:
        if isinstance(self.launcher, SlurmLauncherSpec) and self.ranks % self.launcher.nodes:
            raise ValueError(
                f"launcher.nodes {self.launcher.nodes} does not divide ranks {self.ranks}: every "
                "node has as many"
            )
        return self


class TransformersSamplerSpec(StrictModel):
    """Samples with the model's own transformers implementation, forking caches at branches."""

    engine: Literal["transformers"] = "transformers"
    max_rows: int = Field(512, ge=1)
    """Rows decoded together."""


COLDEST = 0.01
"""The lowest temperature of vLLM, to which it raises lower ones."""


class VllmSamplerSpec(StrictModel):
    """Samples with vLLM, in a process of its own beside every rank."""

    engine: Literal["vllm"]
    max_rows: int = Field(256, ge=1)
    """Rows decoded together."""
    kv_cache_mb: int = Field(512, ge=8)
    """Memory of the key-value cache on the CPU."""
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """Share of a GPU's memory that vLLM may take, weights included."""
    colocate: bool = True
    """Share the GPU of the rank, asleep while that learns; false takes a GPU more per rank."""
    weight_transfer: Literal["file", "ipc", "nccl"] = "file"
    """How the learner's weights arrive: through shared memory; by a handle to the rank's own copy
    on the GPU that both use; by a broadcast to a GPU that is not colocated."""
    tolerance: float | None = Field(None, gt=0)
    """Nats that its log-probabilities may be off the learner's once it has the learner's weights;
    null: 0.001 in float32, 0.2 in bfloat16."""

    @property
    def needs_gpu(self) -> bool:
        """Whether this makes no sense on a CPU."""
        return not self.colocate or self.weight_transfer != "file"

    @model_validator(mode="after")
    def _arrives(self) -> Self:
        if self.weight_transfer == "ipc" and not self.colocate:
            raise ValueError(
                "weight_transfer ipc reads the rank's own GPU, so it needs colocate: true; nccl "
                "reaches another one"
            )
        if self.weight_transfer == "nccl" and self.colocate:
            raise ValueError(
                "weight_transfer nccl joins two GPUs, so it needs colocate: false; ipc is for one"
            )
        return self


def _add_default_engine(said: Any) -> Any:
    if isinstance(said, dict) and "engine" not in said:
        return {"engine": "transformers", **said}
    return said


_Engines = Annotated[TransformersSamplerSpec | VllmSamplerSpec, Field(discriminator="engine")]

SamplerSpec = Annotated[
    _Engines, BeforeValidator(_add_default_engine, json_schema_input_type=_Engines)
]
"""`engine` may be left out for that of transformers."""

VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]


class EvaluationSpec(StrictModel):
    """Held-out problems, one sampled answer (and one confidence) each, before and after."""

    problems: int = Field(600, ge=1)
    every: int = Field(0, ge=0)
    """Steps between evaluations during training; 0 evaluates before and after only."""
    correct: str = "accuracy"
    """The reward that says, by the value 1, that an answer is correct."""
    greedy: bool = False
    """Answer every problem once more, each token the most likely; told apart as `NAME.greedy`."""
    variants: dict[VariantName, dict[str, Any]] = Field(default_factory=dict)
    """More held-out sets, by name: options that the task has there, over those it is trained on."""


class TrackingSpec(StrictModel):
    """Where records go. Paths and URLs; `{home}` is RLX_HOME."""

    registry: str = "sqlite:///{home}/registry.db"
    mlflow: str | None = "sqlite:///{home}/mlflow.db"
    """null keeps no mirror."""
    rollouts: Literal["all", "none"] = "all"
    """Which rollouts keep their bodies."""
    pictures: bool = True
    """Whether a run that has finished is drawn, which takes a few seconds."""

    @field_validator("registry", "mlflow")
    @classmethod
    def _no_secret(cls, url: str | None) -> str | None:
        if url is not None and redact_passwords(url) != url:
            raise ValueError(
                "a password does not belong into an experiment, of which copies are kept: put it "
                "into ~/.pgpass or PGPASSWORD, or for MLflow into MLFLOW_TRACKING_PASSWORD; "
                "RLX_REGISTRY may hold a whole URL"
            )
        return url
