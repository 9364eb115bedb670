"""The `sampler:` section (entry-point group `rlx.samplers`): the engine that samples."""

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from rlx.plugin import PluginSection, SamplerPlugin
from rlx.spec.base import Count, StrictModel

__all__ = [
    "SAMPLERS",
    "SamplerPoolSpec",
    "SamplerSpec",
    "TransformersSamplerSpec",
    "VllmSamplerSpec",
]


class TransformersSamplerSpec(SamplerPlugin):
    """Samples with the transformers model, forking its KV cache where a tree branches."""

    implementation: ClassVar[str] = "rlx.sampler:open_transformers"
    own_model: ClassVar[bool] = False

    engine: Literal["transformers"] = "transformers"

    @property
    def dialogues_at_once(self) -> int | None:
        return self.max_rows


class SamplerPoolSpec(StrictModel):
    """vLLM servers on devices of their own, which all ranks of a machine share."""

    servers: int = Field(1, ge=1, le=64)
    """Servers on every machine that has ranks. Each holds the whole model; the rows of every rank
    are spread over all of them."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """Devices over which each server splits its model. It must divide the number of attention
    heads."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Fraction of the memory of each of these GPUs that vLLM may use, weights included."""
    repeatable: bool = False
    """Each server answers one request at a time, and begins it with an empty prefix cache. Numbers
    then depend neither on when other ranks ask nor on what was asked before, to the last bit, also
    if a server is replaced; GPUs are used less well."""

    @property
    def devices(self) -> int:
        """Number of devices that the servers of one machine take."""
        return self.servers * self.tensor_parallel


class VllmSamplerSpec(SamplerPlugin):
    """Samples with vLLM: in a separate process for every rank, or in a pool of servers."""

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
    """Fraction of a GPU's memory that vLLM may use, weights included."""
    max_length: Count | None = Field(None, ge=1)
    """Tokens of the longest dialogue on a GPU. vLLM reserves memory for a batch of this many; a
    longer dialogue restarts it with more. null: what the experiment's turns may need."""
    colocate: bool = True
    """Share the rank's GPU and sleep during updates; false uses one more GPU per rank."""
    pool: SamplerPoolSpec | None = None
    """Sample on servers apart from the learner, which need not fit beside it; null: a process
    beside every rank."""
    weight_transfer: Literal["file", "ipc", "nccl"] = "file"
    """How the learner's weights are transferred. file: through shared memory. ipc: as a handle to
    the rank's copy on the GPU that both use. nccl: as a broadcast to a GPU that is not
    colocated."""
    adapters: Literal["swap", "merge"] = "swap"
    """How LoRA adapters arrive. swap: the adapter alone, beside the weights that it adapts, if vLLM
    takes adapters of this model, otherwise as for merge. merge: all weights, with the adapter
    added."""
    tolerance: float | None = Field(None, gt=0)
    """Maximum mean difference, in nats, between vLLM's log-probabilities and the learner's under
    the same weights; null: 0.001 in float32, 0.1 in bfloat16."""

    def for_length(self, tokens: int) -> Self:
        # A pool has its devices for itself: as much as model and cache allow.
        is_set = self.max_length or self.pool
        return self if is_set else self.model_copy(update={"max_length": tokens})

    @property
    def needs_gpu(self) -> bool:
        return not self.colocate or self.weight_transfer != "file"

    @property
    def gpus_per_rank(self) -> int:
        return 1 if self.colocate else 2

    @property
    def gpus_apart(self) -> int:
        return self.pool.devices if self.pool else 0

    @property
    def cache_bytes(self) -> int:
        return self.kv_cache_mb << 20

    @property
    def max_drift(self) -> float | None:
        return self.tolerance

    @model_validator(mode="after")
    def _is_pool_alone(self) -> Self:
        if self.pool is None:
            return self
        if not self.colocate:
            raise ValueError(
                "colocate false gives every rank a vLLM on a GPU of its own, and pool has its own "
                "GPUs already: remove one of them"
            )
        if self.weight_transfer != "file":
            raise ValueError(
                f"weight_transfer {self.weight_transfer} reaches one process beside a rank; a pool "
                "takes weights as file"
            )
        if self.gpu_memory_utilization != type(self).model_fields["gpu_memory_utilization"].default:
            raise ValueError(
                "gpu_memory_utilization is the share of a rank's GPU, which a pool does not use: "
                "set pool.gpu_memory_utilization"
            )
        return self

    @model_validator(mode="after")
    def _arrives(self) -> Self:
        if self.weight_transfer == "ipc" and not self.colocate:
            raise ValueError(
                "weight_transfer ipc works only within one GPU, so it needs colocate: true; "
                "nccl works between GPUs"
            )
        if self.weight_transfer == "nccl" and self.colocate:
            raise ValueError(
                "weight_transfer nccl works between GPUs, so it needs colocate: false; "
                "ipc works within one GPU"
            )
        return self


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
