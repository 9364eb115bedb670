"""How far sampling and an update of a real model are from their matrix products alone.

The products of one step are recorded, and replayed on random values of the same shapes and layouts.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import beside, in_turns, row, spent
from own_steps import OwnSteps
from real_steps import ANSWER, ANSWERS, PROMPTS, ROUNDS, TOKENS, build_prompts, real_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rlx.credit import estimate_grpo
from rlx.spec import Grpo, SingleRolloutSpec, TurnSpec

__all__ = ["smollm2_products"]

PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "_linear_pointwise")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION = (*PRODUCTS, FLASH, f"{FLASH}_backward")
"""Operators that count as matrix products, without attention in one call and with it."""
COPIES = 16
"""Tensors of one kind that take turns in a replay, as the weights of layers do."""
LARGE = 1 << 22
"""Elements of a tensor that has no copies: no cache holds it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A tensor but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def draw(self) -> Tensor:
        """A tensor of this kind."""
        size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return torch.rand(size, dtype=self.dtype).as_strided(self.shape, self.stride)


class Recording(TorchDispatchMode):
    """The products that run within its block."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self.calls: list[tuple[Callable[..., Any], Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes a product, and runs every operator."""
        if func.overloadpacket.__name__ in self._names:
            note = partial(tree_map_only, Tensor, _describe)
            self.calls.append((func, note(args), note(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _describe(tensor: Tensor) -> Kind:
    return Kind(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


class Replay:
    """Runs recorded products again, without what lies between them."""

    def __init__(self, recording: Recording) -> None:
        self._tensors: dict[Kind, Iterator[Tensor]] = {}
        take = partial(tree_map_only, Kind, self._take)
        self._calls = [(func, take(args), take(kwargs)) for func, args, kwargs in recording.calls]

    def __call__(self) -> None:
        """All products, in their order."""
        for func, args, kwargs in self._calls:
            func(*args, **kwargs)

    def _take(self, kind: Kind) -> Tensor:
        if kind not in self._tensors:
            count = 1 if math.prod(kind.shape) > LARGE else COPIES
            self._tensors[kind] = itertools.cycle([kind.draw() for _ in range(count)])
        return next(self._tensors[kind])


def smollm2_products() -> list[dict]:
    """Sampling and update of 4 prompts with 8 answers of 32 tokens each, beside their products."""
    with real_model():
        texts = build_prompts()
        rollout = SingleRolloutSpec(
            num_generations_answer=ANSWERS, answer=TurnSpec(max_new_tokens=ANSWER)
        )
        steps = OwnSteps(rollout, partial(estimate_grpo, options=Grpo()), TOKENS)
        chosen = texts[:PROMPTS]
        steps.step(chosen, 0)  # what is built once
        with Recording(PRODUCTS) as sampling, torch.no_grad():
            trees = steps.sample(chosen, 0)
        with Recording(PRODUCTS) as update:
            steps.learn(trees)
        with Recording(ATTENTION) as attention:
            steps.learn(trees)
        parts = {
            "sampling_products": (lambda: steps.sample(chosen, 0), Replay(sampling)),
            "update_products": (lambda: steps.learn(trees), Replay(update)),
            "update_products_attention": (lambda: steps.learn(trees), Replay(attention)),
        }
        figures = []
        for name, (own, products) in parts.items():
            sides = {"own": partial(spent, own), "products": partial(spent, products)}
            took = in_turns(sides, ROUNDS)
            pairs = zip(took["own"], took["products"], strict=True)
            figures.append(
                row(
                    f"smollm2_{name}",
                    [ours.cpu / theirs.cpu for ours, theirs in pairs],
                    beside("its matrix products alone", [t.cpu for t in took["products"]]),
                    "times as long",
                    milliseconds=1e3 * sorted(t.cpu for t in took["own"])[ROUNDS // 2],
                )
            )
    return figures
