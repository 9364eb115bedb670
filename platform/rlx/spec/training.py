"""Sections for the optimizer, critic, phases, runner, evaluation and tracking."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlx.spec.base import Betas, Count, StrictModel
from rlx.spec.launcher import LauncherSpec, LocalLauncherSpec
from rlx.text import list_url_secrets

__all__ = [
    "CheckpointSpec",
    "CriticSpec",
    "EvaluationSpec",
    "OptimizerSpec",
    "PhaseSpec",
    "RunnerSpec",
    "TrackingSpec",
]


class OptimizerSpec(StrictModel):
    """AdamW and its learning-rate schedule, which spans the steps of one phase."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = Field(0, ge=0)
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Final learning rate of a linear or cosine schedule, as a fraction of the peak."""
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    updates_per_rollout: Count = Field(1, ge=1)
    """Passes over each batch of rollouts."""
    mini_batches: Count = Field(1, ge=1)
    """Parts of equally many prompts into which a batch of rollouts is split, with one optimizer
    step each. Advantages are those of the whole batch; the loss averages over one part."""


class CriticSpec(StrictModel):
    """A copy of the model with a value head, trained by its own engine."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate; constant after the warm-up."""
    warmup_steps: Count = Field(0, ge=0)
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    updates_per_rollout: Count = Field(1, ge=1)
    """Passes of the critic over each batch of rollouts."""
    mini_batches: Count = Field(1, ge=1)
    """Parts of a batch of rollouts, with one optimizer step of the critic each."""
    value_clip: float | None = Field(0.5, gt=0)
    """PPO value clipping: the loss clips new values to within this distance of the values at
    sampling time; null disables it."""
    lead_steps: Count = Field(0, ge=0)
    """Number of steps, counting those with a critic, in which only the critic is trained before
    the policy starts."""


class PhaseSpec(StrictModel):
    """A training phase with its own settings. Phases share the data cursor."""

    name: str = Field(min_length=1)
    steps: Count = Field(ge=1)
    set: dict[str, Any] = Field(default_factory=dict)
    """`path.to.key: value`, applied on top of the experiment for this phase."""
    fresh_optimizer: bool = True
    """Start with empty Adam moments; false carries them over from the previous phase."""


class CheckpointSpec(StrictModel):
    """When training checkpoints are written and how many are kept."""

    every: Count = Field(10, ge=0)
    """Steps between checkpoints; the last step also gets one. 0: only when the run is stopped."""
    keep: Count = Field(2, ge=1)
    """Number of newest checkpoints to keep; an older one is the fallback if the newest is
    damaged."""


class RunnerSpec(StrictModel):
    """Training processes of the learner: device, ranks, precision, checkpoints."""

    engine: Literal["deepspeed"] = "deepspeed"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: Count = Field(1, ge=1)
    launcher: LauncherSpec = LocalLauncherSpec.model_construct()
    """Which machines the ranks run on."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: Count = Field(16_384, ge=1)
    """Packed tokens per rank and backward pass."""
    activation_checkpointing: bool = False
    """Store only the inputs of each layer and recompute the rest in the backward pass: less
    memory, about a third more time."""
    offload_optimizer: bool = False
    """Keep Adam's moments and the master weights in host memory, and run the optimizer there."""
    threads: Count = Field(1, ge=1)
    """CPU threads per rank."""
    reward_workers: Count = Field(1, ge=1)
    """Scoring processes per rank."""
    checkpoint: CheckpointSpec = CheckpointSpec.model_construct()
    max_attempts: Count = Field(3, ge=1)
    """Maximum attempts: if a process crashes or hangs, the run restarts from its checkpoint."""
    hang_after: float = Field(3600.0, gt=0)
    """Seconds without progress after which an attempt is killed."""
    reward_memory_mb: Count = Field(1024, ge=64)
    """Address space that a scoring process may allocate beyond its size at start."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        return self

    @model_validator(mode="after")
    def _nodes_fit(self) -> Self:
        self.launcher.check_ranks(self.ranks)
        return self

    @property
    def is_alone(self) -> bool:
        """Whether there is a single rank, on the supervisor's machine, which needs no launcher."""
        return isinstance(self.launcher, LocalLauncherSpec) and self.ranks == 1


VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]


class EvaluationSpec(StrictModel):
    """Evaluation on held-out problems before and after training: one sampled answer (and one
    confidence) per problem."""

    problems: Count = Field(600, ge=1)
    every: Count = Field(0, ge=0)
    """Steps between evaluations during training; 0 evaluates only before and after."""
    distinct: bool = False
    """Ask each problem once: skip problems that the task draws again. If many draws in a row bring
    nothing new, the set has fewer problems."""
    correct: str = "accuracy"
    """The reward whose value 1 means that an answer is correct."""
    greedy: bool = False
    """Also answer every problem with greedy decoding; reported as `NAME.greedy`."""
    variants: dict[VariantName, dict[str, Any]] = Field(default_factory=dict)
    """Additional held-out sets by name, each with task options that override those of training."""


REGISTRY_URL = re.compile(r"sqlite:///.+|postgresql(\+\w+)?://.+")
MLFLOW_URL = re.compile(r"(https?|file|(sqlite|postgresql|mysql|mssql)(\+\w+)?)://.+|databricks")


class StoredRollouts(StrictModel):
    """Which steps' rollouts are stored."""

    every: Count = Field(ge=1)
    """Steps from one that is stored to the next. The first step and the last are always stored."""


class TrackingSpec(StrictModel):
    """Where results are stored. Paths and URLs; `{home}` is replaced by RLX_HOME."""

    registry: str = "sqlite:///{home}/registry.db"
    mlflow: str | None = "sqlite:///{home}/mlflow.db"
    """null disables the MLflow mirror."""
    experiment: str = Field("rlx", max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """MLflow experiment that the run belongs to: one per project."""
    rollouts: Literal["all", "none"] | StoredRollouts = "all"
    """Which rollouts are stored with their full content: of all steps, none, or every N-th."""
    pictures: bool = False
    """Draw plots when a run finishes, which takes seconds; `rlx status --pictures` draws them any
    time."""

    @field_validator("registry", "mlflow")
    @classmethod
    def _no_secret(cls, url: str | None) -> str | None:
        if url is not None and list_url_secrets(url):
            raise ValueError(
                "an experiment must not contain a password, because copies of it are kept: put it "
                "into ~/.pgpass or PGPASSWORD, or MLFLOW_TRACKING_PASSWORD for MLflow; "
                "RLX_REGISTRY may hold a whole URL"
            )
        return url

    @field_validator("registry")
    @classmethod
    def _registry_url(cls, url: str) -> str:
        if not REGISTRY_URL.fullmatch(url):
            raise ValueError(
                "must be the URL of a database, such as sqlite:///runs.db or "
                "postgresql+psycopg://user@host/database"
            )
        return url

    @field_validator("mlflow")
    @classmethod
    def _mlflow_url(cls, url: str | None) -> str | None:
        if url is not None and not MLFLOW_URL.fullmatch(url):
            raise ValueError(
                "must be null or a URL, such as sqlite:///mlflow.db or http://localhost:5000"
            )
        return url
