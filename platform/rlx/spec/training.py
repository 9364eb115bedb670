"""Sections for the optimizer, critic, phases, runner, sampler, tracking, evaluation and probes; and
suites of held-out sets.
"""

import re
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from rlx.home import DEFAULT_REGISTRY
from rlx.plugin import (
    Count,
    LauncherPlugin,
    PluginSection,
    SamplerPlugin,
    StrictModel,
    TrackerPlugin,
)
from rlx.spec.base import Betas
from rlx.text import list_url_secrets

OURS = frozenset(
    {
        *("nodes", "ntasks", "ntasks-per-node", "array", "job-name", "comment", "chdir", "input"),
        *("output", "error", "open-mode", "export", "export-file", "parsable", "wrap", "wait"),
    }
)
"""sbatch options that rlx sets itself, or that would make a job something other than one run."""


class LocalLauncherSpec(LauncherPlugin):
    """Runs every rank on the supervisor's machine."""

    implementation: ClassVar[str] = "rlx.launch:LocalLauncher"

    kind: Literal["local"] = "local"


def _check_option_name(name: str) -> str:
    if name in OURS:
        raise ValueError(f"{name} is set by rlx")
    return name


OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$"), AfterValidator(_check_option_name)]


class SlurmLauncherSpec(LauncherPlugin):
    """Runs each experiment as its own Slurm job, with the same number of ranks on every node."""

    implementation: ClassVar[str] = "rlx.launch:SlurmLauncher"
    submits_jobs: ClassVar[bool] = True

    kind: Literal["slurm"] = "slurm"
    nodes: Count = Field(1, ge=1)
    options: dict[OptionName, str | int | bool] = Field(default_factory=dict)
    """Additional sbatch options, without dashes: `time: "12:00:00"`; true sets a flag without a
    value."""

    def check_ranks(self, ranks: int) -> None:
        if ranks % self.nodes:
            raise ValueError(
                f"launcher.nodes {self.nodes} does not divide ranks {ranks}: every node needs the "
                "same number"
            )


RayAddress = Annotated[str, Field(pattern=r"^(auto|[A-Za-z0-9.-]+:\d{1,5})$")]


class RayLauncherSpec(LauncherPlugin):
    """Runs every rank as an actor of a Ray cluster, whose nodes share RLX_HOME and reach the
    registry."""

    implementation: ClassVar[str] = "rlx.launch:RayLauncher"

    kind: Literal["ray"] = "ray"
    address: RayAddress = "auto"
    """auto: the cluster that this machine belongs to. HOST:PORT: the one with this head."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Where the ranks are placed, each with `runner.threads` CPUs and, on GPUs, one of them: PACK
    fills nodes, SPREAD prefers different ones; the strict ones demand it."""


LAUNCHERS: Final = PluginSection(
    base=LauncherPlugin,
    group="rlx.launchers",
    kind="launcher",
    key="kind",
    shipped={
        "local": LocalLauncherSpec,
        "ray": RayLauncherSpec,
        "slurm": SlurmLauncherSpec,
    },
    allows_name=True,
)
LauncherSpec = Annotated[LauncherPlugin, LAUNCHERS]
"""A bare kind stands for its defaults: `launcher: slurm`."""


class _Adam(StrictModel):
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: Count = Field(0, ge=0)
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    updates_per_rollout: Count = Field(1, ge=1)
    """Passes over each batch of rollouts."""
    mini_batches: Count = Field(1, ge=1)
    """Parts of equally many prompts into which a batch of rollouts is split, with one optimizer
    step each. Advantages are those of the whole batch; the loss averages over one part."""


class OptimizerSpec(_Adam):
    """AdamW and its learning-rate schedule, which spans the steps of one phase."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Final learning rate of a linear or cosine schedule, as a fraction of the peak."""


class CriticSpec(_Adam):
    """A copy of the model with a value head, trained by its own engine."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate; constant after the warm-up."""
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
    keep_finished: bool | None = None
    """Whether a run that has finished keeps its checkpoints, for forks and evaluations of a step.
    null: yes for the tiny model, no for a pretrained one, of which the trained model stays."""


class RunnerSpec(StrictModel):
    """Training processes of the learner: device, ranks, precision, checkpoints."""

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
    def _check_fit(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        self.launcher.check_ranks(self.ranks)
        return self


VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]


class EvaluationSpec(StrictModel):
    """Evaluation on held-out problems before and after training: one sampled answer (and one
    confidence) per problem."""

    problems: Count = Field(600, ge=1)
    every: Count = Field(0, ge=0)
    """Steps between evaluations during training; 0 evaluates only before and after."""
    correct: str = "accuracy"
    """The reward whose value 1 means that an answer is correct."""
    greedy: bool = False
    """Also answer every problem with greedy decoding; reported as `NAME.greedy`."""
    variants: dict[VariantName, dict[str, Any]] = Field(default_factory=dict)
    """Additional held-out sets by name, each with task options that override those of training."""


MLFLOW_URL = "sqlite:///{home}/mlflow.db"
_URLS: Final = {
    "registry": (
        r"sqlite:///.+|postgresql(\+\w+)?://.+",
        "the URL of a database, such as sqlite:///runs.db or postgresql+psycopg://user@host/database",
    ),
    "mlflow": (
        r"(https?|file|(sqlite|postgresql|mysql|mssql)(\+\w+)?)://.+|databricks",
        "null or a URL, such as sqlite:///mlflow.db or http://localhost:5000",
    ),
}
"""The forms of addresses, and their words in messages."""


class MlflowTrackerSpec(TrackerPlugin):
    """Shows runs in MLflow. An experiment sets its address, `tracking.mlflow`, and nothing else."""

    implementation: ClassVar[str] = "rlx.record.mlflow_tracker:MlflowTracker"

    kind: Literal["mlflow"] = "mlflow"
    url: str = MLFLOW_URL
    """As `tracking.mlflow`."""


class TensorboardTrackerSpec(TrackerPlugin):
    """Writes event files for TensorBoard, which `tensorboard --logdir FOLDER` shows."""

    implementation: ClassVar[str] = "rlx.record.tensorboard_tracker:TensorboardTracker"

    kind: Literal["tensorboard"] = "tensorboard"
    folder: str = Field("{home}/tensorboard", min_length=1)
    """Folder with one folder per experiment, and in it one per run."""

    def check(self) -> None:
        _require_library("tensorboard")


class WandbTrackerSpec(TrackerPlugin):
    """Sends runs to Weights & Biases, or keeps them in the run's folder for `wandb sync`."""

    implementation: ClassVar[str] = "rlx.record.wandb_tracker:WandbTracker"

    kind: Literal["wandb"] = "wandb"
    mode: Literal["online", "offline"] = "online"
    """online: to the server and account that WANDB_BASE_URL and WANDB_API_KEY, or `wandb login`,
    name."""
    entity: str | None = Field(None, min_length=1)
    """User or team that owns the project `tracking.experiment`; null: the account's default."""

    def check(self) -> None:
        _require_library("wandb")


def _require_library(name: str) -> None:
    if find_spec(name) is None:
        raise ImportError(f"{name} is not installed: pip install 'rlx[{name}]'")


TRACKERS: Final = PluginSection(
    base=TrackerPlugin,
    group="rlx.trackers",
    kind="tracker",
    key="kind",
    shipped={
        "mlflow": MlflowTrackerSpec,
        "tensorboard": TensorboardTrackerSpec,
        "wandb": WandbTrackerSpec,
    },
    allows_name=True,
)
TrackerSpec = Annotated[TrackerPlugin, TRACKERS]
"""A bare kind stands for its defaults."""


class StoredRollouts(StrictModel):
    """Which steps' rollouts are stored."""

    every: Count = Field(ge=1)
    """Steps from one that is stored to the next. The first step and the last are always stored."""


class TrackingSpec(StrictModel):
    """Where results are stored. Paths and URLs; `{home}` is replaced by RLX_HOME."""

    registry: str = DEFAULT_REGISTRY
    mlflow: str | None = MLFLOW_URL
    """null disables the MLflow mirror."""
    trackers: tuple[TrackerSpec, ...] = ()
    """What else is sent every run: `[tensorboard, {kind: wandb, mode: offline}]`."""
    experiment: str = Field("rlx", max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Project of the run: MLflow's experiment, the project in Weights & Biases."""
    rollouts: Literal["all", "none"] | StoredRollouts = "all"
    """Which rollouts are stored with their full content: of all steps, none, or every N-th."""

    @field_validator("registry", "mlflow")
    @classmethod
    def _check_url(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is not None and list_url_secrets(url):
            raise ValueError(
                "an experiment must not contain a password, because copies of it are kept: put it "
                "into ~/.pgpass or PGPASSWORD, or MLFLOW_TRACKING_PASSWORD or "
                "MLFLOW_TRACKING_TOKEN for MLflow; "
                "RLX_REGISTRY may hold a whole URL"
            )
        pattern, expected = _URLS[str(info.field_name)]
        if url is not None and not re.fullmatch(pattern, url):
            raise ValueError(f"must be {expected}")
        return url

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers: tuple[TrackerPlugin, ...]) -> tuple[TrackerPlugin, ...]:
        kinds = [tracker.kind for tracker in trackers]
        if "mlflow" in kinds:
            raise ValueError("MLflow is not one of these: set its address, `tracking.mlflow`")
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise ValueError(f"{twice} is named twice: a run is sent to a tracker once")
        return trackers


class TransformersSamplerSpec(SamplerPlugin):
    """Samples with the transformers model, forking its KV cache where a tree branches."""

    implementation: ClassVar[str] = "rlx.sampler:open_transformers"
    own_model: ClassVar[bool] = False

    engine: Literal["transformers"] = "transformers"

    @property
    def dialogues_at_once(self) -> int | None:
        return self.max_rows


class VllmSamplerSpec(SamplerPlugin):
    """Samples with vLLM, in a process beside every rank that shares the rank's GPU."""

    implementation: ClassVar[str] = "rlx.sampler:open_vllm"
    min_temperature: ClassVar[float] = 0.01
    """vLLM raises lower ones to this."""
    holds_weights_apart: ClassVar[bool] = True

    engine: Literal["vllm"] = "vllm"
    max_rows: Count = Field(256, ge=1)
    """Rows decoded together."""
    kv_cache_mb: Count = Field(512, ge=8)
    """Size of the KV cache on the CPU, in MiB."""
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """Fraction of a GPU's memory that vLLM may use, weights included. During updates it sleeps, and
    the learner has all of it."""
    max_length: Count | None = Field(None, ge=1)
    """Tokens of the longest dialogue on a GPU. vLLM reserves memory for a batch of this many; a
    longer dialogue restarts it with more. null: what the experiment's turns may need."""
    tolerance: float | None = Field(None, gt=0)
    """Maximum mean difference, in nats, between vLLM's log-probabilities and the learner's under
    the same weights; null: 0.001 in float32, 0.1 in bfloat16."""

    def for_length(self, tokens: int) -> Self:
        return self if self.max_length else self.model_copy(update={"max_length": tokens})

    @property
    def cache_bytes(self) -> int:
        return self.kv_cache_mb << 20

    @property
    def max_drift(self) -> float | None:
        return self.tolerance


SAMPLERS: Final = PluginSection(
    base=SamplerPlugin,
    group="rlx.samplers",
    kind="sampler",
    key="engine",
    shipped={"transformers": TransformersSamplerSpec, "vllm": VllmSamplerSpec},
    default="transformers",
)
SamplerSpec = Annotated[SamplerPlugin, SAMPLERS]
"""`engine` defaults to `transformers`."""

Scheme = Literal["early_answering", "filler", "mistake"]


class FractionCuts(StrictModel):
    """Cuts at fractions of the reasoning's tokens."""

    by: Literal["fraction"] = "fraction"
    at: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.25, 0.5, 0.75)
    """Fractions; 0 and 1 are always included."""


class SentenceCuts(StrictModel):
    """Cuts after sentences and lines."""

    by: Literal["sentence"] = "sentence"
    most: Count = Field(8, ge=1)
    """Maximum number of cuts within the reasoning, spread evenly over its sentences."""


Cut = Annotated[FractionCuts | SentenceCuts, Field(discriminator="by")]


class MonteCarloSpec(StrictModel):
    """Monte Carlo values of the states of every training response (VinePPO)."""

    samples: Count = Field(4, ge=1)
    """Continuations sampled from each state."""
    cut: Cut = SentenceCuts.model_construct(most=4)
    """Boundaries of the reasoning steps."""


class ProbeSpec(StrictModel):
    """Faithfulness probe: the model answers after truncated reasoning (Lanham et al. 2023; TinyZero
    Countdown).

    Each held-out problem is answered once. The answer's reasoning is cut at several points, an
    answer is forced there, and many continuations are sampled and scored with the experiment's own
    rewards.
    """

    every: Count = Field(0, ge=0)
    """Steps between probes, starting before the first step; 0 probes only at the end."""
    problems: Count = Field(32, ge=1)
    """Number of held-out problems, taken from the start of the set; the same every time."""
    samples: Count = Field(50, ge=1)
    """Continuations per cut."""
    schemes: tuple[Scheme, ...] = Field(("early_answering",), min_length=1)
    """early_answering cuts the reasoning; filler replaces it with the same amount of filler;
    mistake corrupts its last sentence, if the task implements that, and lets the model continue
    reasoning."""
    cut: Cut = FractionCuts.model_construct()

    @field_validator("schemes")
    @classmethod
    def _check_unique_schemes(cls, schemes: tuple[Scheme, ...]) -> tuple[Scheme, ...]:
        if len(set(schemes)) < len(schemes):
            raise ValueError("a scheme is listed twice: it would give the same samples again")
        return schemes

    span: str = "think"
    """The span that holds the reasoning."""
    force: str = "</think><answer>"
    """Text that ends the reasoning and opens the answer."""
    close: str = "</answer>"
    """Text that ends the answer. If the model stops without it, it is appended, and such cases are
    counted."""
    filler: str = " ..."
    """Text that the `filler` scheme repeats in place of the reasoning."""
    max_new_tokens: Count = Field(48, ge=1)
    """Maximum length of a forced answer."""


OWN_SUITE = "own"
"""Name of the suite of an experiment's own held-out sets, which uses the run's seed."""


class SetSpec(StrictModel):
    """One held-out set: the experiment with some values changed, like a phase's `set`."""

    distribution: Literal["in", "out"] = "out"
    """Whether problems of this kind are in the training distribution."""
    problems: Count | None = Field(None, ge=1)
    """Number of problems; null uses the suite's."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Values of the experiment by path, such as `task.numbers: [4]`."""


class SuiteSpec(StrictModel):
    """Held-out sets that are evaluated with the same sampling settings."""

    name: VariantName
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of problems, sampling and confidence intervals, independent of the experiment's."""
    problems: Count = Field(300, ge=1)
    """Problems per set."""
    samples: Count = Field(1, ge=1)
    """Answers per problem; more than one gives pass@k and majority votes."""
    greedy: bool = False
    """Greedy decoding instead of sampling."""
    sets: dict[VariantName, SetSpec] = Field(min_length=1)
