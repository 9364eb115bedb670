"""One update from two-turn trees, packed as rlx does it, beside plain rows; `make bench` runs it.

    python tests/benchmarks/updates.py packed|plain short|long

prints the MiB that one update of a process of its own needs at the most.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable

import torch
from harness import Spent, compared, in_turns, row, spent
from models import alone, policy
from plain_rows import ROWS, PlainLearner
from process_use import forget_peak, read_kilobytes
from shapes import LONG, LOSS, SHORT, Shape, train_batch
from torch import nn

from rlx.learner import Learner, Ranks
from rlx.model import Policy
from rlx.spec import OptimizerSpec, RunnerSpec

__all__ = ["RATE", "STEEP", "build_sgd", "rlcr_update_long", "rlcr_update_short", "runner"]

SHAPES = {"short": SHORT, "long": LONG}
ROUNDS = 5
RATE = 1e-6
STEEP = 1e4
"""Rate of plain SGD from which a gradient is read: rounding of the weights does not show in it."""


def rlcr_update_short() -> list[dict]:
    """Forward, backward and AdamW at (100, 60, 30, 12, 8, 4), four prompts."""
    return _update("short")


def rlcr_update_long() -> list[dict]:
    """The same at (200, 300, 30, 20, 8, 8), one prompt."""
    return _update("long")


def _update(name: str) -> list[dict]:
    shape = SHAPES[name]
    ranks = alone()
    train = train_batch(shape, vocabulary=len(policy().tokenizer))
    apart = _apart(shape, ranks)
    learner = Learner(policy(), runner(shape), OptimizerSpec(), ranks)

    def build_plain(*, lean: bool, joined: bool) -> PlainLearner:
        model = policy().model
        return PlainLearner(model, runner(shape), OptimizerSpec(), ranks, lean=lean, joined=joined)

    baselines = {
        "": (
            build_plain(lean=False, joined=False),
            f"weaker: plain rows, gradients {apart:.1g} apart",
        ),
        "_lean": (build_plain(lean=True, joined=False), "weaker: plain rows, lean"),
        "_strongest": (build_plain(lean=True, joined=True), "one row per trajectory, lean"),
    }

    def timed(side: Learner | PlainLearner) -> Callable[[], Spent]:
        return lambda: spent(lambda: side.update(train, LOSS, RATE))

    sides = {"ours": learner, **{ending: side for ending, (side, _) in baselines.items()}}
    took = in_turns({name: timed(side) for name, side in sides.items()}, ROUNDS)
    return [
        *(
            compared(f"rlcr_update_{name}{ending}", took[ending], took["ours"], baseline)
            for ending, (_, baseline) in baselines.items()
        ),
        _memory(name),
    ]


def runner(shape: Shape) -> RunnerSpec:
    """As many tokens in a micro-batch of packed trees as in one of plain rows."""
    return RunnerSpec(device="cpu", zero_stage=0, micro_batch_tokens=ROWS * shape.longest)


def _apart(shape: Shape, ranks: Ranks) -> float:
    """Largest relative L2 distance of one parameter's gradient from that of plain rows.

    Both of all rows and of one row per trajectory.

    Raises:
        AssertionError: it is more than 5e-6, or losses differ by more than 1e-6.
    """
    train = train_batch(shape, vocabulary=len(policy().tokenizer))
    readable = OptimizerSpec(learning_rate=STEEP, max_grad_norm=1e6)
    packed = policy()
    told = Learner(packed, runner(shape), readable, ranks, build_sgd).update(train, LOSS, STEEP)
    assert told is not None
    start = dict(policy().model.named_parameters())

    def steps_of(model: nn.Module) -> dict[str, torch.Tensor]:
        end = dict(model.named_parameters())
        return {name: start[name] - end[name] for name in start}

    found, farthest = steps_of(packed.model), 0.0
    for joined in (False, True):
        single = policy().model
        plain = PlainLearner(
            single, runner(shape), readable, ranks, build_sgd, lean=joined, joined=joined
        )
        loss = plain.update(train, LOSS, STEEP)
        assert abs(told.loss - loss) <= 1e-6, f"losses {told.loss} and {loss}"
        expected = steps_of(single)
        apart = max(float((found[n] - g).norm() / g.norm()) for n, g in expected.items())
        assert apart <= 5e-6, f"gradients {apart} apart"
        farthest = max(farthest, apart)
    return farthest


def build_sgd(parameters: Iterable[nn.Parameter], spec: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=STEEP)


# Memory ------------------------------------------------------------------------------------------


def _memory(name: str) -> dict:
    """Peak of a packed update over that of plain rows, each in processes of its own."""
    packed, plain = ([_measured(side, name) for _ in range(3)] for side in ("packed", "plain"))
    middle = sorted(plain)[1]
    return row(
        f"rlcr_update_memory_{name}",
        [own / middle for own in packed],
        f"plain rows, {middle:.0f} MiB",
        "of their peak",
    )


def _measured(side: str, name: str) -> float:
    command = [sys.executable, __file__, side, name]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main(side: str, name: str) -> None:
    """Prints the peak of one update over what the process held before it."""
    shape = SHAPES[name]
    made: Policy = policy()
    ranks = alone()
    kind = Learner if side == "packed" else PlainLearner
    model = made if side == "packed" else made.model
    learner = kind(model, runner(shape), OptimizerSpec(), ranks)
    # Whatever is made once, such as the optimiser's moments, is made by a step of little trees.
    learner.update(train_batch(Shape(1, 4, 4, 4, 4, 2, 2), len(made.tokenizer)), LOSS, RATE)
    train = train_batch(shape, len(made.tokenizer))
    forget_peak()
    before = read_kilobytes("VmRSS")
    learner.update(train, LOSS, RATE)
    print(json.dumps((read_kilobytes("VmHWM") - before) / 1024))


if __name__ == "__main__":
    main(*sys.argv[1:])
