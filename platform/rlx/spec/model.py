"""The `model:` section: the language model to train."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlx.spec.base import Betas, Count, StrictModel

__all__ = ["Lora", "ModelSpec", "PretrainedModelSpec", "TinyModelSpec", "WarmStart"]


class WarmStart(StrictModel):
    """Supervised fine-tuning on the task's demonstrations before reinforcement learning.

    The result is cached under a digest of everything that affects it.
    """

    steps: Count = Field(600, ge=1)
    batch_size: Count = Field(64, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    """Peak learning rate: linear warm-up over `warmup_steps`, then linear decay to
    `final_fraction` of the peak."""
    warmup_steps: Count = Field(30, ge=0)
    final_fraction: float = Field(0.05, ge=0, le=1)
    betas: Betas = (0.9, 0.98)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class TinyModelSpec(StrictModel):
    """A small Qwen3 built from its configuration class, with random weights and no download."""

    kind: Literal["tiny"] = "tiny"
    tokenizer: Literal["arithmetic", "arithmetic_05", "world"] = "arithmetic"
    """Tokenizer shipped with rlx. `arithmetic` has integers up to 100 and confidences in
    steps of .1, `arithmetic_05` also in steps of .05; `world` has the entities of
    the shipped knowledge graph and the words of questions about them."""
    hidden_size: Count = Field(96, ge=32)
    layers: Count = Field(3, ge=1)
    heads: Count = Field(4, ge=1)
    kv_heads: Count = Field(2, ge=1)
    head_dim: Count = Field(32, ge=32)
    """Dimension of a head; every engine supports 32, some nothing smaller."""
    intermediate_size: Count = Field(256, ge=1)
    initializer_range: float = Field(0.02, gt=0)
    max_position: Count = Field(2048, ge=64)
    warm_start: WarmStart | None = None

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        return self


class Lora(StrictModel):
    """Low-rank adapters: W + alpha / rank · B A with W frozen (Hu et al. 2021, section 4.1).

    There is no dropout: the ratio's denominator must come from exactly the policy that sampled.
    """

    rank: Count = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: tuple[str, ...] = Field(("all-linear",), min_length=1)
    """Names of the linear layers that get adapters, such as `q_proj`; `all-linear` selects all of
    them except the output embedding."""


class PretrainedModelSpec(StrictModel):
    """A Hugging Face causal language model, by name or path."""

    kind: Literal["pretrained"] = "pretrained"
    path: str = Field(min_length=1)
    """A local folder or a name on the Hugging Face Hub."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    chat_template: bool = True
    """Use the tokenizer's chat template if it has one; false uses plain text."""
    lora: Lora | None = None
    """null trains all weights."""
    warm_start: WarmStart | None = None


ModelSpec = Annotated[TinyModelSpec | PretrainedModelSpec, Field(discriminator="kind")]
