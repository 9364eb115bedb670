"""Peak memory of one micro-batch of the learner, by fake tensors: shapes without numbers.

The model, its packed form, the logits, the loss and the backward pass are the learner's own. Flex
attention is replaced by an attention that keeps the same tensors for its backward pass.
"""

import weakref
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.flex_attention import repeat_kv

from rlx.learner import PackedPolicy
from rlx.learner.pack import PackedBatch, PackedBranches
from rlx.loss import clipped_surrogate


def attend(module, query, key, value, mask, scaling=None, **_):
    heads = query.shape[1]
    if heads & (heads - 1):  # as transformers does for flex attention
        key, value = (repeat_kv(states, heads // states.shape[1]) for states in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("rlx_fake_flex", attend)


class FakeForm:
    """The flex form without its mask."""

    name, merges, attention = "fake", True, "rlx_fake_flex"

    def __call__(self, read, packed):
        return read(
            packed.sources,
            input_ids=packed.token_ids[None],
            position_ids=packed.positions[None],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            use_cache=False,
        )


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += self.sizes[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key):
        self.live -= self.sizes.pop(key, 0)


@lru_cache
def measure_update(shape, tokens, targets, *, recomputes, chunks):
    """Peak bytes of a forward and backward pass beyond weights and their gradients.

    Args:
        shape: a `ModelShape` of a Qwen2 model.
        tokens, targets: of the micro-batch.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Qwen2ForCausalLM(build_config(shape)).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        module = PackedPolicy(model)
        module.use(FakeForm())
        if recomputes:
            module.recompute_layers()
        module.chunks_logits = chunks
        none = integers(0)
        packed = PackedBatch(
            token_ids=integers(tokens),
            positions=integers(tokens),
            ends=integers(tokens),
            sources=integers(targets),
            targets=integers(targets),
            rows=integers(targets),
            columns=integers(targets),
            branches=PackedBranches(none, none, none, none, none, none),
        )
        values = torch.rand(targets)
        live = LiveBytes()
        for parameter in module.parameters():
            live.sizes[parameter.untyped_storage()._cdata] = 0
            # ZeRO takes a gradient away as soon as it is there.
            parameter.register_post_accumulate_grad_hook(drop_gradient)
        with live:
            logprobs, _ = module(packed, torch.ones(targets))
            losses = clipped_surrogate(logprobs - values, values, clip=(0.2, 0.2), dual_clip=None)
            (values * losses).sum().backward()
    return live.peak


def drop_gradient(parameter):
    parameter.grad = None


def integers(count):
    return torch.zeros(count, dtype=torch.int64)


def build_config(shape):
    return Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32768,
        attn_implementation="rlx_fake_flex",
    )
