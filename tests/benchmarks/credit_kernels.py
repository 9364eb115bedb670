"""Kernels of credit beside plain loops, and beside what memory allows.

A loop is what one writes first: GAE over the columns of [B, T], GRPO over rows with a dictionary
of groups, turn_proportional over rows and turns. The strongest plain form is what one writes next:
GAE in place over the rows of [T, B], GRPO by scatter_add, turn_proportional turn by turn over all
rows. All get the same tensors, return the same
numbers, and run in turns in one process on one thread. No time can be shorter than the bytes that
must be read and written once take at the speed of a triad, a = b + s·c, over arrays of 64 MiB.
`make bench` runs them; see bench.py.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from harness import Spent, compared, spent
from torch import Tensor

from rlx.credit import (
    CreditInputs,
    compute_gae_advantages,
    group_advantages,
    place_rewards,
    spread_over_mask,
)
from rlx.spec import TurnProportional

LARGEST = (4096, 4096)
"""The size of the figure that a kernel's own name stands for."""
SIZES = (LARGEST, (1024, 1024), (4096, 1024), (8192, 1024))
ROUNDS = 4  # the first is discarded
TURNS = 4
GROUP = 8
GAMMA, LAM = 0.99, 0.95
SCATTER = "scatter_add, without exact zeros"


@dataclass(frozen=True)
class Kernel:
    """`bytes` must be read or written at least once, whoever does it.

    Attributes:
        formula: the strongest plain form, and its name.
    """

    ours: Callable[[], object]
    loop: Callable[[], object]
    formula: tuple[str, Callable[[], object]]
    bytes: int


def credit_kernels(*names: str) -> list[dict]:
    """How many times as fast as its loop each kernel is, at each size, and its share of memory."""
    torch.set_num_threads(1)
    return [
        figure
        for name in names
        for size in SIZES
        for figure in measured(name, size, kernels(*size)[name])
    ]


def kernels(rows: int, width: int) -> dict[str, Kernel]:
    rng = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(rows, width, generator=rng) for _ in range(2))
    scores = torch.rand(rows, generator=rng)
    groups = torch.arange(rows) // GROUP
    prefix, turn_ids = masks(rows, width, rng)
    gaps = turn_ids > 0
    turns = torch.rand(rows, TURNS, generator=rng)
    present = torch.ones(rows, TURNS, dtype=torch.bool)
    per_gae = [rewards, values]
    ours_gae = partial(compute_gae_advantages, gamma=GAMMA, lam=LAM, environment="skip")
    rewarded = CreditInputs.from_rewards(turns, present, scores, turn_ids, gaps)
    tokens = rows * width
    return {
        # rewards, values and mask in; advantages and returns out
        "gae": Kernel(
            lambda: ours_gae(*per_gae, prefix),
            lambda: gae_loop(*per_gae, prefix),
            ("loop in place over [T, B]", lambda: gae_by_time(*per_gae, prefix)),
            17 * tokens,
        ),
        "gae_gaps": Kernel(
            lambda: ours_gae(*per_gae, gaps),
            lambda: gae_loop(*per_gae, gaps),
            ("loop in place over [T, B]", lambda: gae_by_time(*per_gae, gaps)),
            17 * tokens,
        ),
        # mask in, advantages out
        "grpo_outcome": Kernel(
            lambda: spread_over_mask(group_advantages(scores, groups), prefix),
            lambda: on_rows(grpo_loop(scores, groups), prefix),
            (SCATTER, lambda: on_rows(grpo_scattered(scores, groups), prefix)),
            5 * tokens,
        ),
        # scores and ids in, advantages out
        "grpo_per_row": Kernel(
            lambda: group_advantages(scores, groups),
            lambda: grpo_loop(scores, groups),
            (SCATTER, lambda: grpo_scattered(scores, groups)),
            16 * rows,
        ),
        # turn ids and mask in, token rewards out
        "turn_proportional": Kernel(
            lambda: place_rewards(rewarded, placement=TurnProportional()).token_rewards,
            lambda: turn_proportional_loop(turns, scores, turn_ids, gaps),
            ("turn by turn", lambda: turn_proportional_by_turn(turns, scores, turn_ids, gaps)),
            13 * tokens,
        ),
    }


def masks(rows: int, width: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """A prefix of each row, half of it or more; and turns with an observation after each."""
    at = torch.arange(width)
    ends = torch.randint(width // 2, width + 1, (rows, 1), generator=rng)
    borders = torch.rand(rows, 2 * TURNS, generator=rng).cumsum(dim=1)
    borders = (borders / borders[:, -1:] * ends).long()
    pieces = (at >= borders[:, :, None]).sum(dim=1)
    return at < ends, torch.where((pieces % 2 == 0) & (at < ends), pieces // 2 + 1, -1)


# Loops -------------------------------------------------------------------------------------------


def gae_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Column after column from the last; where a token does not learn, nothing moves."""
    learns = mask.float()
    after, next_value, columns = torch.zeros(len(rewards)), torch.zeros(len(rewards)), []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        advantage = delta + GAMMA * LAM * after
        next_value = values[:, t] * learns[:, t] + next_value * (1 - learns[:, t])
        after = advantage * learns[:, t] + after * (1 - learns[:, t])
        columns.append(after)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages * learns, (advantages + values) * learns


def gae_by_time(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same in place over contiguous rows of [T, B]."""
    advantages, seen, learns = (x.t().contiguous() for x in (rewards, values, mask.float()))
    after, next_value = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(len(advantages))):
        advantages[t].add_(next_value, alpha=GAMMA).sub_(seen[t]).add_(after, alpha=GAMMA * LAM)
        next_value.lerp_(seen[t], learns[t])
        advantages[t] = after.lerp_(advantages[t], learns[t])
    returns = seen.add_(advantages).mul_(learns)
    return advantages.mul_(learns).t().contiguous(), returns.t().contiguous()


def grpo_scattered(scores: Tensor, groups: Tensor) -> Tensor:
    """Ids from 0 on; equal scores get what rounding makes of 0."""
    zeros = torch.zeros(int(groups.max()) + 1)
    counts = zeros.scatter_add(0, groups, torch.ones_like(scores))
    centred = scores - (zeros.scatter_add(0, groups, scores) / counts)[groups]
    deviations = (zeros.scatter_add(0, groups, centred.square()) / (counts - 1)).sqrt()
    return centred / (deviations[groups] + 1e-6)


def turn_proportional_by_turn(
    turns: Tensor, overall: Tensor, turn_ids: Tensor, mask: Tensor
) -> Tensor:
    """Every turn of all rows at once."""
    placed = (overall / mask.sum(dim=1))[:, None] * mask
    for k in range(turns.shape[1]):
        own = mask & (turn_ids == k + 1)
        placed.addcmul_((turns[:, k] / own.sum(dim=1).clamp(min=1))[:, None], own)
    return placed


def grpo_loop(scores: Tensor, groups: Tensor) -> Tensor:
    members = defaultdict(list)
    for i, group in enumerate(groups.tolist()):
        members[group].append(scores[i])
    stacked = {group: torch.stack(own) for group, own in members.items()}
    means = {group: own.mean() for group, own in stacked.items()}
    deviations = {group: own.std() for group, own in stacked.items()}
    advantages = torch.zeros_like(scores)
    for i, group in enumerate(groups.tolist()):
        advantages[i] = (scores[i] - means[group]) / (deviations[group] + 1e-6)
    return advantages


def on_rows(per_row: Tensor, mask: Tensor) -> Tensor:
    return per_row[:, None] * mask


def turn_proportional_loop(
    turns: Tensor, overall: Tensor, turn_ids: Tensor, mask: Tensor
) -> Tensor:
    placed = torch.zeros(mask.shape)
    for i in range(len(turns)):
        placed[i, mask[i]] = overall[i] / mask[i].sum()
        for k in range(turns.shape[1]):
            own = mask[i] & (turn_ids[i] == k + 1)
            placed[i, own] += turns[i, k] / own.sum()
    return placed


# Timing ------------------------------------------------------------------------------------------


def measured(kind: str, size: tuple[int, int], kernel: Kernel) -> list[dict]:
    """The figures of a kernel beside its loop, which is the weaker, and beside its formula."""
    said, formula = kernel.formula
    for plain in (kernel.loop, formula):
        torch.testing.assert_close(kernel.ours(), plain(), rtol=1e-4, atol=1e-4)
    triad = Triad()
    loops, formulas, ours, speeds = [], [], [], []
    for _ in range(ROUNDS):
        loops.append(spent(kernel.loop))
        formulas.append(middle([spent(formula) for _ in range(3)]))
        ours.append(middle([spent(kernel.ours) for _ in range(3)]))
        speeds.append(triad.bytes / spent(triad).cpu)
    kept = list(zip(ours[1:], speeds[1:], strict=True))
    share = statistics.median(kernel.bytes / speed / own.cpu for own, speed in kept)
    ending = "" if size == LARGEST else f" {size[0]}x{size[1]}"
    return [
        compared(f"{name}{ending}", plain[1:], ours[1:], baseline, share_of_bandwidth=share)
        for name, plain, baseline in (
            (kind, loops, "weaker: plain loop"),
            (f"{kind}_strongest", formulas, said),
        )
    ]


def middle(took: list[Spent]) -> Spent:
    return Spent(statistics.median(t.cpu for t in took), statistics.median(t.wall for t in took))


class Triad:
    bytes = 3 * 2**26

    def __init__(self) -> None:
        self.a, self.b, self.c = (torch.ones(2**24) for _ in range(3))

    def __call__(self) -> None:
        torch.add(self.b, self.c, alpha=0.5, out=self.a)
