"""A compact decoder for the architecture shared by Llama, Mistral, Qwen2, Qwen3 and SmolLM3.

Matrices of the model with the same input are fused into one tensor, `[in, out]`, and the model's
parameters become views of it: no weight is stored twice, and weights loaded into the model take
effect immediately.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of layer i: takes queries `[n, heads, width]`, keys and values `[n, kv_heads, width]`
of new tokens, and returns `[n, heads · width]`."""

PARTS = {
    "model": ({"model", "lm_head"}, set()),
    "body": ({"embed_tokens", "layers", "norm", "rotary_emb"}, set()),
    "layer": ({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}, set()),
    "attention": ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}),
    "mlp": ({"gate_proj", "up_proj", "down_proj", "act_fn"}, set()),
}
"""Required and optional submodules of a plain decoder."""

FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Types of rotary embeddings whose angles do not depend on the length of the dialogue."""


def unknown_part(model: PreTrainedModel) -> str | None:
    """Describes the first part of a model that differs from a plain decoder; None if none does.

    Whether the same parts are also connected in the same way can only be seen by comparing outputs.
    """
    if found := _find_odd_submodule("model", model) or _find_odd_submodule("body", model.model):
        return found
    kind = getattr(model.model.rotary_emb, "rope_type", None)
    if not isinstance(kind, str):  # by kind of layer
        return "rotary embeddings that differ between layers"
    if kind not in FIXED_ROTATIONS:
        return f"a rotary embedding of type {kind}"
    for layer in model.model.layers:
        if found := (
            _find_odd_submodule("layer", layer)
            or _find_odd_submodule("attention", layer.self_attn)
            or _find_odd_submodule("mlp", layer.mlp)
        ):
            return found
    return None


def _find_odd_submodule(place: str, module: nn.Module) -> str | None:
    needed, allowed = PARTS[place]
    found = {name for name, _ in module.named_children()}
    if missing := needed - found:
        return f"no {min(missing)} in its {place}"
    unknown = found - needed - allowed
    return f"{min(unknown)} in its {place}" if unknown else None


class PlainDecoder:
    """Computes a model for which `unknown_part` returns None.

    It is rebuilt whenever weights may have been replaced, which is cheap if they are fused already.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key and value heads, each serving `heads / kv_heads` query heads.
        width: dimension of a head.
        angles: cosines and signed sines of rotations, `[2, positions, 1, width]`; recomputed when
            there are too few positions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base = model.model
        attention = base.layers[0].self_attn
        self.width: int = attention.head_dim
        self.scale: float = attention.scaling
        self.heads = attention.q_proj.out_features // self.width
        self.kv_heads = attention.k_proj.out_features // self.width
        self.layers = len(base.layers)
        with torch.inference_mode(False), torch.no_grad():
            self._blocks = [_Block(layer, self.heads, self.kv_heads) for layer in base.layers]
        self._embedding: Tensor = base.embed_tokens.weight.detach()
        self._norm = base.norm
        self._head = model.lm_head
        self._rotary = base.rotary_emb
        self.angles: Tensor = self._embedding.new_empty(2, 0, 1, self.width)

    @property
    def template_tensor(self) -> Tensor:
        """A tensor with the dtype and device of the computation."""
        return self._embedding

    def compute_hidden_states(
        self, tokens: Tensor, positions: Tensor, longest: int, attend: Attend
    ) -> Tensor:
        """Computes the last hidden states, `[n, hidden size]`.

        Args:
            tokens: `[n]`, from any dialogues.
            positions: `[n]`, each below `longest`, which is known without a device synchronization.
            attend: called with every layer's queries and new keys and values.
        """
        cos, sin = self._rotation(longest).index_select(1, positions)
        both, half = self.heads + self.kv_heads, self.width // 2
        x = functional.embedding(tokens, self._embedding)
        for number, block in enumerate(self._blocks):
            mixed = block.qkv(_apply_rms_norm(x, block.before_attention)).view(
                len(x), -1, self.width
            )
            qk, v = mixed[:, :both], mixed[:, both:]
            if block.qk_norm is not None:
                qk = functional.rms_norm(qk, (self.width,), None, block.qk_epsilon) * block.qk_norm
            if block.rotates:
                qk = torch.addcmul(qk * cos, qk.roll(half, -1), sin)
            seen = attend(number, qk[:, : self.heads], qk[:, self.heads :], v)
            x = block.out.add_to_residual(x, seen)
            gate, up = block.gate_up.split_in_two(_apply_rms_norm(x, block.before_mlp))
            x = block.down.add_to_residual(x, block.act(gate) * up)
        return _apply_rms_norm(x, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes `[n, V]` logits from `[n, hidden size]` hidden states."""
        logits: Tensor = self._head(hidden)
        return logits

    def _rotation(self, longest: int) -> Tensor:
        """Returns `[2, positions, 1, width]`: cosines, and sines with the first half negated."""
        if longest > self.angles.shape[1]:
            count = max(longest, 2 * self.angles.shape[1], 256)
            cos, sin = self._rotary(
                self._embedding, torch.arange(count, device=self._embedding.device)[None]
            )
            sin[..., : self.width // 2].neg_()
            self.angles = torch.stack([cos[0], sin[0]])[:, :, None]
        return self.angles


def _apply_rms_norm(x: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


class _Block:
    """One layer's weights, with matrices of the same input fused."""

    def __init__(self, layer: Any, heads: int, kv_heads: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention = layer.input_layernorm
        self.before_mlp = layer.post_attention_layernorm
        self.qkv = _Matrix([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _Matrix([attention.o_proj])
        self.gate_up = _Matrix([mlp.gate_proj, mlp.up_proj])
        self.down = _Matrix([mlp.down_proj])
        self.act = mlp.act_fn
        self.rotates = bool(getattr(attention, "use_rope", True))
        self.qk_norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight, attention.k_norm.weight
            self.qk_norm = torch.cat(
                [w.expand(n, -1) for w, n in zip(norms, (heads, kv_heads), strict=True)]
            )
            self.qk_epsilon = attention.q_norm.variance_epsilon


class _Matrix:
    """Linear maps with the same input, fused into one map to their concatenated outputs."""

    def __init__(self, maps: Sequence[nn.Linear]) -> None:
        if {type(m) for m in maps} != {nn.Linear} or len({m.bias is None for m in maps}) > 1:
            raise ValueError("maps that are not plain")
        self._weight = _concatenate_weights([m.weight for m in maps])
        biases = [m.bias.detach() for m in maps if m.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight.t(), self._bias)

    def split_in_two(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps `x` to the outputs of two equally wide maps; on a GPU one by one, since what follows
        is faster on contiguous outputs than one product is on two."""
        if not x.is_cuda or self._bias is not None:
            first, second = self(x).chunk(2, dim=-1)
        else:
            first, second = (functional.linear(x, w.t()) for w in self._weight.chunk(2, dim=1))
        return first, second

    def add_to_residual(self, residual: Tensor, x: Tensor) -> Tensor:
        total = torch.addmm(residual, x, self._weight)
        return total if self._bias is None else total + self._bias


def _concatenate_weights(weights: Sequence[Tensor]) -> Tensor:
    """Returns a fused `[in, sum of outs]` tensor and makes the weights, `[out, in]` each, its
    views."""
    total = sum(len(w) for w in weights)
    first, at = weights[0], weights[0].storage_offset()
    where = first.untyped_storage().data_ptr()
    for w in weights:
        there = w.untyped_storage().data_ptr(), w.storage_offset(), w.stride()
        if there != (where, at, (1, total)):
            break
        at += len(w)
    else:
        shape = first.shape[1], total
        return first.detach().as_strided(shape, (total, 1), first.storage_offset())
    fused = torch.cat([w.detach() for w in weights]).t().contiguous()
    for w, part in zip(weights, fused.split([len(w) for w in weights], dim=1), strict=True):
        w.data = part.t()
    return fused
