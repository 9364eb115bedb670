"""The `model:` section: the language model to train."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlx.plugin import Count, StrictModel
from rlx.spec.base import Betas
from rlx.spec.reward import PluginUse
from rlx.text import escape_unprintable

CLOSED_VOCABULARIES = ("arithmetic", "arithmetic_05", "world")
"""Tokenizers shipped with rlx that write only the texts of some tasks."""
TOKENIZERS = ("bytes", "train", *CLOSED_VOCABULARIES)


def is_tokenizer_folder(name: str) -> bool:
    """Whether `model.tokenizer` is a path, which has a `/` or begins with `.` or `~`."""
    return "/" in name or name[0] in ".~"


class WarmStart(StrictModel):
    """Supervised fine-tuning on demonstrations before reinforcement learning.

    The result is cached under a digest of everything that affects it.
    """

    demonstrations: PluginUse | None = None
    """The task whose demonstrations are learned, with its options, such as `{plugin: dataset,
    train: {path: worked.jsonl}, …}`; null: those of the experiment's own task."""
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


class PretrainedWarmStart(WarmStart):
    """A warm start of a model that writes text already: it learns the form of the answers, and a
    tiny model's rate would make it forget the rest."""

    steps: Count = Field(20, ge=1)
    batch_size: Count = Field(8, ge=1)
    learning_rate: float = Field(2e-5, gt=0)
    warmup_steps: Count = Field(3, ge=0)


class ModelFiles(StrictModel):
    """A causal language model in the Hugging Face layout."""

    path: str = Field(min_length=1)
    """A local folder or a name on the Hugging Face Hub."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""


class TinyModelSpec(StrictModel):
    """A small Qwen3 built from its configuration class, with random weights and no download."""

    kind: Literal["tiny"] = "tiny"
    tokenizer: str | None = Field(None, min_length=1)
    """`bytes` writes any text, one token per byte. `train` is a byte-level BPE of at most 1024
    tokens, trained on the task's own texts when the run is submitted. `arithmetic` has integers up
    to 100 and confidences in steps of .1, `arithmetic_05` also in steps of .05; `world` has the
    entities of the shipped knowledge graph and the words of questions about them. A path, such as
    `./tokenizer`, is the folder of a tokenizer. null follows the task: the first of these closed
    ones that can write the task's texts, otherwise `train`."""
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
    reference: ModelFiles | None = None
    """The model from which KL divergence is measured, such as a teacher: one with the same
    tokenizer, which is neither trained nor sampled. null: the policy as it begins."""

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer_name(cls, name: str | None) -> str | None:
        if name is not None and name not in TOKENIZERS and not is_tokenizer_folder(name):
            shown = escape_unprintable(name if len(name) <= 40 else f"{name[:39]}…")
            raise ValueError(
                f"there is no tokenizer '{shown}'; there are: {', '.join(TOKENIZERS)}; the path of "
                "a folder has a '/', as in './tokenizer'"
            )
        return name

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


class PretrainedModelSpec(ModelFiles):
    """A Hugging Face causal language model, by name or path."""

    kind: Literal["pretrained"] = "pretrained"
    chat_template: bool = True
    """Use the tokenizer's chat template if it has one; false uses plain text."""
    lora: Lora | None = None
    """null trains all weights."""
    warm_start: PretrainedWarmStart | None = None
    reference: ModelFiles | None = None
    """The model from which KL divergence is measured, such as a teacher: one with the same
    tokenizer, which is neither trained nor sampled. null: the policy as it begins."""


ModelSpec = Annotated[TinyModelSpec | PretrainedModelSpec, Field(discriminator="kind")]
