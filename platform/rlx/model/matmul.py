"""Float32 matrix multiplication on the CPU: by torch, or by oneDNN where a trial finds it faster.

torch calls MKL, which uses AVX2 on some AMD processors, where oneDNN uses AVX-512. Their results
differ in the last bits, so a run keeps its choice for all its attempts. oneDNN has more overhead
per call, so the trial also finds the size from which it pays, and few rows always go to torch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = [
    "TORCH",
    "MatmulChoice",
    "OneDnnLinear",
    "apply_matmul",
    "choose_matmul",
    "compute_linear",
]

MIN_ROWS = 128
"""Minimum number of rows of an input that goes to oneDNN."""
MARGIN = 1.3
"""Minimum speedup of oneDNN; well above timing noise, so that a machine always chooses alike."""
OPERATOR = "_linear_pointwise"
"""torch's binding of oneDNN's linear layer; not public, and absent on some platforms."""
TRIALS = {(256, 96, 96): 20, (512, 96, 256): 4, (2816, 96, 256): 1}
"""Rows, inputs and outputs of the trials, from small to large, and repetitions of each."""
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class MatmulChoice:
    """The library that multiplies float32 matrices on the CPU.

    Attributes:
        library: its name.
        speedup: of oneDNN over torch for the largest product of the trial; None if there was no
            trial.
        smallest: rows × inputs × outputs of the smallest product that goes to oneDNN.
    """

    library: Literal["torch", "oneDNN"] = "torch"
    speedup: float | None = None
    smallest: int = 0

    def __str__(self) -> str:
        if self.speedup is None:
            return self.library
        return f"{self.library} (in a trial oneDNN had {self.speedup:.1f} times the speed of torch)"


TORCH = MatmulChoice()


def choose_matmul() -> MatmulChoice:
    """Times a linear layer and its gradients with both libraries, by size.

    Returns:
        oneDNN for the sizes from which on it is faster by `MARGIN`; torch if there are none, also
        where torch lacks oneDNN.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, OPERATOR)):
        return TORCH
    speedups = {shape: _measure_speedup(shape, times) for shape, times in TRIALS.items()}
    faster = list(takewhile(lambda shape: speedups[shape] >= MARGIN, reversed(TRIALS)))
    speedup = round(speedups[max(TRIALS, key=prod)], 2)
    if not faster:
        return MatmulChoice("torch", speedup)
    return MatmulChoice("oneDNN", speedup, prod(faster[-1]))


def _measure_speedup(shape: tuple[int, int, int], repeats: int) -> float:
    """CPU seconds of torch over those of oneDNN, the least of rounds in alternation."""
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )

    def time_multiplications(multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
        began = time.process_time()
        for _ in range(repeats):
            multiply(x, weight)
            multiply(gradient, weight.t())
            multiply(x.t(), gradient.t())
        return time.process_time() - began

    with torch.no_grad():
        times = [
            (time_multiplications(nn.functional.linear), time_multiplications(_multiply))
            for _ in range(ROUNDS)
        ]
    return min(by_torch for by_torch, _ in times) / min(by_onednn for _, by_onednn in times)


def apply_matmul(model: nn.Module, choice: MatmulChoice) -> None:
    """Makes a model's linear layers use the chosen library, also after weights are replaced."""
    if choice.library == "oneDNN":
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear
                vars(module)["smallest"] = choice.smallest


class OneDnnLinear(nn.Linear):
    """A linear layer that uses oneDNN; see `compute_linear`."""

    smallest: int

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[..., in]` to `[..., out]`."""
        return compute_linear(input, self.weight, self.bias, self.smallest)


def compute_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, smallest: int = 0
) -> Tensor:
    """Returns x Wᵀ + b: by oneDNN for large float32 products on the CPU, else by torch.

    Args:
        x: `[..., in]`; fewer than `MIN_ROWS` rows go to torch.
        weight: `[out, in]`.
        bias: `[out]`, or None.
        smallest: rows × inputs × outputs of the smallest product that goes to oneDNN.

    Returns:
        `[..., out]`.
    """
    supported = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    is_small = x.numel() < MIN_ROWS * x.shape[-1] or x.numel() * len(weight) < smallest
    if not supported or is_small:
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
    """Returns aᵀ b; oneDNN is faster if it takes the wider operand as the weight."""
    narrow = a.shape[1] <= b.shape[1]
    return _multiply(a.t(), b.t()) if narrow else _multiply(b.t(), a.t()).t()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = getattr(torch.ops.mkldnn, OPERATOR)(x, weight, bias, "none", [], "")
    return result
