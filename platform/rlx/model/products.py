"""Float32 matrix products on the CPU: torch's own, or oneDNN's where a trial finds them faster.

torch multiplies by MKL, which uses AVX2 on AMD processors, where oneDNN uses AVX-512. Their results
differ in the last bits, so a run keeps its choice for all its attempts. Products of few rows are
torch's in any case: there oneDNN's preparation costs more than it saves.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = [
    "BY_TORCH",
    "OneDnnLinear",
    "ProductChoice",
    "choose_products",
    "map_rows",
    "use_products",
]

FEWEST_ROWS = 128
"""Rows of an input from which on oneDNN may multiply."""
MARGIN = 1.3
"""How much faster oneDNN must be: far from chance, so that a machine always chooses alike."""
TRIAL = (512, 96, 256)
"""Rows, inputs and outputs of the trial."""
ROUNDS, REPEATS = 5, 4


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """Who multiplies.

    Attributes:
        by: the library.
        speedup: of oneDNN over torch in the trial; None if there was none.
    """

    by: Literal["torch", "oneDNN"] = "torch"
    speedup: float | None = None

    def __str__(self) -> str:
        if self.speedup is None:
            return self.by
        return f"{self.by}, {self.speedup:.1f} times as fast by oneDNN in a trial"


BY_TORCH = ProductChoice()


def choose_products() -> ProductChoice:
    """Times the products of a linear layer and of its gradients in CPU seconds, in turns.

    Returns:
        oneDNN's if they are faster by `MARGIN`; torch's otherwise.
    """
    if not torch.backends.mkldnn.is_available():
        return BY_TORCH
    rows, inputs, outputs = TRIAL
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )

    def time_products(multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
        began = time.process_time()
        for _ in range(REPEATS):
            multiply(x, weight)
            multiply(gradient, weight.t())
            multiply(x.t(), gradient.t())
        return time.process_time() - began

    with torch.no_grad():
        times = [
            (time_products(nn.functional.linear), time_products(_multiply)) for _ in range(ROUNDS)
        ]
    by_torch, by_onednn = map(min, zip(*times, strict=True))
    speedup = by_torch / by_onednn
    return ProductChoice("oneDNN" if speedup >= MARGIN else "torch", round(speedup, 2))


def use_products(model: nn.Module, choice: ProductChoice) -> None:
    """Makes a model's linear layers multiply as chosen, now and after weights are replaced."""
    if choice.by == "oneDNN":
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """A linear layer by oneDNN, where its input is float32, on the CPU, and has enough rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[..., in]` to `[..., out]`."""
        return map_rows(input, self.weight, self.bias)


def map_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x Wᵀ + b, `[..., out]`, by oneDNN where it may multiply, else by torch.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.
    """
    may = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if not may or x.numel() < FEWEST_ROWS * x.shape[-1]:
        return nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled():
        mapped: Tensor = _OneDnnMap.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return mapped
    return _multiply(x, weight, bias)


class _OneDnnMap(torch.autograd.Function):
    """y = x Wᵀ + b, and its gradients: dx = dy W, dW = dyᵀ x, db = Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        return (
            _multiply(dy, weight.t()) if of_x else None,
            _multiply_transposed(rows, x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Returns aᵀ b; oneDNN is faster if what it takes for the weight is the wider one."""
    narrow = a.shape[1] <= b.shape[1]
    return _multiply(a.t(), b.t()) if narrow else _multiply(b.t(), a.t()).t()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
