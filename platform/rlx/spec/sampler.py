"""The `sampler:` section (entry-point group `rlx.samplers`): the engine that samples."""

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field

from rlx.plugin import PluginSection, SamplerPlugin
from rlx.spec.base import Count

__all__ = ["SAMPLERS", "SamplerSpec", "TransformersSamplerSpec", "VllmSamplerSpec"]


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
