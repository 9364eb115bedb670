"""Chain attention beside grouped attention, which has masks; `make bench` runs it.

    python tests/benchmarks/chains.py chain|grouped NAME

prints the MiB that an update of the shape NAME needs at the most, or a layer of `one`, in a process
of its own.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from unittest.mock import patch

import torch
from harness import Spent, compared, in_turns, row, spent
from models import alone, policy
from process_use import forget_peak, read_kilobytes
from shapes import LONG, LOSS, Shape, train_batch
from torch import Tensor
from transformers import AttentionInterface
from updates import RATE, STEEP, build_sgd, runner

from rlx.learner import Learner, choice
from rlx.learner.attention import PACKED, AttentionBlocks
from rlx.learner.chains import AttentionChains
from rlx.learner.engine import MakeOptimizer, build_adamw
from rlx.learner.forms import ChainForm, ForwardForm, GroupedForm, PlainForm
from rlx.model import Policy
from rlx.spec import OptimizerSpec

__all__ = ["chain_tree", "chain_updates"]

FORMS: Mapping[str, ForwardForm] = {"chain": ChainForm(), "grouped": GroupedForm()}
LAYOUTS = {"chain": AttentionChains, "grouped": AttentionBlocks}
SHAPES = {"long": LONG, "longer": Shape(1, 200, 1000, 30, 20, answers=8, confidences=2)}
PROMPT, ANSWERS, ANSWER = 200, 8, 8000
"""The tree of 64,200 tokens."""
HEADS, KEY_HEADS, WIDTH = 4, 2, 64
ROUNDS, LAYERS = 5, 3
"""Rounds of updates, and of a layer."""
NEAR = 5e-6


def chain_updates() -> list[dict]:
    """Updates from trees with long chains."""
    return [*_compare_updates("long"), *_compare_updates("longer")]


def _compare_updates(name: str) -> list[dict]:
    shape, made = SHAPES[name], policy()
    train = train_batch(shape, vocabulary=len(made.tokenizer))
    ends = {form: _learn_once(form, shape) for form in FORMS}
    start = dict(policy().model.named_parameters())
    apart = max(
        float((ends["chain"][n] - w).norm() / (start[n].detach() - w).norm())
        for n, w in ends["grouped"].items()
    )
    assert apart <= NEAR, f"gradients {apart} apart"
    learners = {form: _build_learner(policy(), form, shape) for form in FORMS}

    def timed(learner: Learner) -> Callable[[], Spent]:
        return lambda: spent(lambda: learner.update(train, LOSS, RATE))

    took = in_turns({form: timed(learner) for form, learner in learners.items()}, ROUNDS)
    baseline = f"grouped attention, gradients {apart:.1g} apart"
    return [
        compared(f"chain_update_{name}", took["grouped"], took["chain"], baseline),
        _compare_peaks(f"chain_update_memory_{name}", name),
    ]


def _learn_once(form: str, shape: Shape) -> dict[str, Tensor]:
    """Weights after a step of plain SGD, from which a gradient is read."""
    made = policy()
    readable = OptimizerSpec(learning_rate=STEEP, max_grad_norm=1e6)
    learner = _build_learner(made, form, shape, readable, build_sgd)
    learner.update(train_batch(shape, vocabulary=len(made.tokenizer)), LOSS, STEEP)
    return {name: weight.detach() for name, weight in made.model.named_parameters()}


def _build_learner(
    made: Policy,
    form: str,
    shape: Shape,
    optimizer: OptimizerSpec | None = None,
    make_optimizer: MakeOptimizer = build_adamw,
) -> Learner:
    with patch.dict(choice.FORMS, cpu=(FORMS[form], PlainForm())):
        limits = runner(shape)
        learner = Learner(made, limits, optimizer or OptimizerSpec(), alone(), make_optimizer)
    assert learner.chosen.form is FORMS[form], str(learner.chosen)
    return learner


# One tree ----------------------------------------------------------------------------------------


def chain_tree() -> list[dict]:
    """The attention of one layer in one tree, forward and backward."""
    inputs, layouts, found = _draw_states(), {}, {}

    def lay_out(form: str) -> None:
        layouts[form] = _lay_out_tree(form)

    def attend(form: str) -> None:
        found[form] = _attend_tree(layouts[form], inputs)

    built = in_turns({n: lambda n=n: spent(lambda: lay_out(n)) for n in FORMS}, LAYERS, warm_up=0)
    took = in_turns({n: lambda n=n: spent(lambda: attend(n)) for n in FORMS}, LAYERS, warm_up=0)
    pairs = list(zip(*found.values(), strict=True))
    apart = max(float((own - other).norm() / other.norm()) for own, other in pairs)
    assert apart <= NEAR, f"gradients {apart} apart"
    masks = sum(mask.numel() for mask in layouts["grouped"].masks) / 2**18
    tokens = f"{PROMPT + ANSWERS * ANSWER}"
    return [
        compared(
            f"chain_layer {tokens}",
            *(took["grouped"], took["chain"]),
            f"grouped attention, gradients {apart:.1g} apart",
        ),
        compared(
            f"chain_layout {tokens}",
            *(built["grouped"], built["chain"]),
            f"layout of grouped attention, {masks:.0f} MiB of masks",
        ),
        _compare_peaks(f"chain_memory {tokens}", "one"),
    ]


def _lay_out_tree(form: str) -> AttentionBlocks | AttentionChains:
    answer = torch.arange(PROMPT, PROMPT + ANSWER)
    positions = torch.cat([torch.arange(PROMPT), answer.repeat(ANSWERS)])
    ends = (torch.arange(ANSWERS) + 1).repeat_interleave(ANSWER) * ANSWER + PROMPT
    ends = torch.cat([ends[-1:].expand(PROMPT), ends])
    return LAYOUTS[form].from_positions(positions, ends)


def _draw_states() -> list[Tensor]:
    """Queries, keys and values, seen by head."""
    generator = torch.Generator().manual_seed(0)
    length = PROMPT + ANSWERS * ANSWER
    return [
        torch.randn(1, length, heads, WIDTH, generator=generator).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def _attend_tree(
    layout: AttentionBlocks | AttentionChains, inputs: list[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients through the attention of one layer."""
    output, _ = AttentionInterface()[PACKED](None, *inputs, None, rlx_layout=layout)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return torch.autograd.grad(output, inputs, weights)


# Memory ------------------------------------------------------------------------------------------


def _compare_peaks(figure: str, name: str) -> dict:
    """Peak of chain attention over that of grouped attention, each in processes of its own."""
    chain, grouped = ([_measure(form, name) for _ in range(3)] for form in FORMS)
    middle = sorted(grouped)[1]
    baseline = f"grouped attention, {middle:.0f} MiB"
    return row(figure, [own / middle for own in chain], baseline, "of their peak")


def _measure(form: str, name: str) -> float:
    command = [sys.executable, __file__, form, name]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main(form: str, name: str) -> None:
    """Prints the peak over what the process held before."""
    if name == "one":
        inputs = _draw_states()
        work: Callable[[], object] = lambda: _attend_tree(_lay_out_tree(form), inputs)  # noqa: E731
    else:
        made, shape = policy(), SHAPES[name]
        learner = _build_learner(made, form, shape)
        # Whatever is made once, such as the optimiser's moments, is made by a step of little trees.
        learner.update(train_batch(Shape(1, 4, 4, 4, 4, 2, 2), len(made.tokenizer)), LOSS, RATE)
        train = train_batch(shape, len(made.tokenizer))
        work = lambda: learner.update(train, LOSS, RATE)  # noqa: E731
    forget_peak()
    before = read_kilobytes("VmRSS")
    work()
    print(json.dumps((read_kilobytes("VmHWM") - before) / 1024))


if __name__ == "__main__":
    main(*sys.argv[1:])
