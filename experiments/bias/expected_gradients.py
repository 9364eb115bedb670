"""Expected gradients of estimators on the process of `stopping_process.py`.

A step holds one or more prompts with a group of rollouts each. Its rewards go through rlx's own
rows, placement, estimator and loss; the gradient of its loss is then averaged over all steps, each
with its probability, or over steps drawn at random.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import torch
from stopping_process import TURNS, Process, build_process, grow_tree, list_groups, score_trees
from torch import Tensor

from rlx.batch import build_token_batch
from rlx.discovery import bind_implementation, load_plugin
from rlx.loss import compute_token_losses
from rlx.phase_setup import CreditRules
from rlx.plugin import Estimator
from rlx.spec import CreditSpec, Gdpo, LossSpec, Uniform
from rlx.step import ScoredRows, TokenStreams, assign_credit, join_row_rewards, place_row_rewards

Group = tuple[int, ...]
ENUMERATED = ((1, 4), (2, 2))
"""Sizes of the enumerated steps: prompts, rollouts of each."""


SUM_LOSS = LossSpec(aggregate="sequence_sum")
"""A loss that adds no bias."""


@dataclass(frozen=True)
class Case:
    """An estimator with its options, a placement and a loss.

    Attributes:
        critic: what it adds to the exact value of every state.
    """

    estimator: Estimator
    credit: CreditSpec
    loss: LossSpec = SUM_LOSS
    critic: float = 0.0

    @property
    def rules(self) -> CreditRules:
        """The rules of a phase with this estimator."""
        return CreditRules(
            estimator=bind_implementation(self.estimator),
            credit=self.credit,
            loss=self.loss,
            max_tokens={"turn": 2 * TURNS},
        )

    @property
    def objective(self) -> str:
        """The return that its rewards add up to: turns summed ("sum") or averaged ("mean")."""
        reads = self.estimator.reading()
        if reads == "turns":
            return "mean" if isinstance(self.estimator, Uniform | Gdpo) else "sum"
        if reads == "scores" and self.credit.score_source == "structured":
            return "mean"
        return self.credit.turn_reduce or self.rules.placement.turn_reduce


def build_case(name: str, placement: str, critic: float = 0.0, **options: Any) -> Case:
    """A shipped estimator whose scores are sums of token rewards, so that the placement counts."""
    credit = {"placement": placement, "score_source": "token_rewards"}
    return Case(
        load_plugin("estimator", name)(**options), CreditSpec.model_validate(credit), critic=critic
    )


class Step(NamedTuple):
    """The rows of a step, the rollout of each row, and the step's probability."""

    rows: ScoredRows
    rollouts: Group
    probability: float


PROCESS = build_process()


def build_rows(process: Process, groups: Sequence[Group]) -> ScoredRows:
    """Rows of a step, rewards in float64: they are sums of powers of 2, exact in float32 too."""
    trees = [grow_tree(process, group) for group in groups]
    batch = build_token_batch(trees)
    mask = bind_implementation(load_plugin("mask", "model_tokens")())(batch)
    rows = join_row_rewards(batch, trees, score_trees(trees), mask)
    doubled = {k: v.double() for k, v in vars(rows.rewards).items() if _is_float(v)}
    return ScoredRows(batch=batch, rewards=replace(rows.rewards, **doubled))


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@cache
def list_steps(prompts: int, size: int) -> tuple[Step, ...]:
    """Every step of `prompts` prompts with `size` rollouts each."""
    groups = list(list_groups(PROCESS, size))
    return tuple(_build_steps(groups, prompts))


def _build_steps(groups: Sequence[tuple[Group, float]], prompts: int) -> Iterator[Step]:
    if prompts > 2:
        raise ValueError("only steps of one or two prompts are enumerated")
    for several in combinations_with_replacement(groups, prompts):
        chance = float(torch.tensor([p for _, p in several], dtype=torch.float64).prod())
        orders = len(set(several))  # two different groups come in two orders
        chosen = [group for group, _ in several]
        yield Step(build_rows(PROCESS, chosen), sum(chosen, ()), orders * chance)


def draw_steps(prompts: int, size: int, count: int, seed: int) -> Iterator[Step]:
    """Yields steps drawn at random, with equal weights."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = torch.multinomial(
            PROCESS.probabilities, prompts * size, replacement=True, generator=random
        )
        groups = [tuple(group) for group in drawn.reshape(prompts, size).tolist()]
        yield Step(build_rows(PROCESS, groups), sum(groups, ()), 1 / count)


class Streams:
    """The streams that an estimator may need, of every rollout, for one case."""

    def __init__(self, process: Process, case: Case) -> None:
        rules = case.rules
        everything = build_rows(process, [tuple(range(len(process.rollouts)))])
        placed = place_row_rewards(everything, rules).token_rewards[everything.mask]
        rewards = placed.split(process.lengths)
        self.tokens = {
            "values": [x + case.critic for x in process.compute_values(rewards)],
            "collision_probs": process.collisions,
            "step_ids": _list_step_ids(process),
        }
        self.logprobs = process.logprobs
        summed = case.credit.score_source == "token_rewards"
        scores = torch.stack([x.sum() for x in rewards]) if summed else process.returns["mean"]
        self.greedy = scores[process.greedy]
        self.turn_values = _compute_turn_values(process, scores)

    def build(self, step: Step) -> TokenStreams:
        """The streams of a step."""
        mask, rollouts = step.rows.mask, step.rollouts
        return TokenStreams(
            old_logprobs=_lay_out(self.logprobs, rollouts, mask, 0.0),
            optional={
                **{k: _lay_out(x, rollouts, mask, 0.0) for k, x in self.tokens.items()},
                "step_ids": _lay_out(self.tokens["step_ids"], rollouts, mask, -1),
                "mc_values": self.turn_values[list(rollouts)],
                "greedy_scores": self.greedy.expand(len(rollouts)),
            },
        )


def _lay_out(tokens: Sequence[Tensor], rollouts: Group, mask: Tensor, fill: float) -> Tensor:
    """`[B, T]` the rollouts' own tokens at their places."""
    flat = torch.cat([tokens[n] for n in rollouts])
    return torch.full(mask.shape, fill, dtype=flat.dtype).masked_scatter(mask, flat)


def _list_step_ids(process: Process) -> list[Tensor]:
    """For every token, the number of its turn, from 0: a turn is a step of reasoning."""
    return [
        torch.tensor([k for k, turn in enumerate(rollout) for _ in turn])
        for rollout in process.rollouts
    ]


def _compute_turn_values(process: Process, scores: Tensor) -> Tensor:
    """`[N, TURNS + 1]` the expected score before each turn; 0 after the last one."""
    values = scores.new_zeros(len(process.rollouts), TURNS + 1)
    for n, rollout in enumerate(process.rollouts):
        for k in range(len(rollout)):
            here = torch.tensor([other[:k] == rollout[:k] for other in process.rollouts])
            chances = torch.where(here, process.probabilities, 0.0)
            values[n, k] = (chances * scores).sum() / chances.sum()
    return values


def compute_coefficients(case: Case, steps: Sequence[Step]) -> Tensor:
    """`[S, N, L]` for every step and token of a rollout, the factor of its ∇ log π.

    It is minus the derivative of the step's loss by the token's log-probability, at the policy that
    sampled, added up over the rows that have this rollout.
    """
    rules, streams = case.rules, Streams(PROCESS, case)
    shape = PROCESS.scores.shape[:2]
    coefficients = torch.zeros(len(steps), *shape, dtype=torch.float64)
    for s, step in enumerate(steps):
        train = assign_credit(step.rows, streams.build(step), rules)
        mask = train.mask
        old = train.streams.old_logprobs[mask]
        logprobs = old.clone().requires_grad_()
        rows = mask.nonzero()[:, 0]
        losses = compute_token_losses(logprobs, old, train.advantages[mask], rows, rules.loss)
        (slope,) = torch.autograd.grad((train.weights[mask] * losses.losses).sum(), logprobs)
        at = [n * shape[1] + t for n in step.rollouts for t in range(PROCESS.lengths[n])]
        coefficients[s].view(-1).index_add_(0, torch.tensor(at), -slope)
    return coefficients


def compute_gradients(case: Case, steps: Sequence[Step]) -> Tensor:
    """`[S, P]` the gradient of every step, in the direction in which the optimizer goes."""
    return torch.einsum("snl,nlp->sp", compute_coefficients(case, steps), PROCESS.scores)


def compute_expected_gradient(case: Case, steps: Sequence[Step]) -> Tensor:
    """`[P]` Σ over steps of probability · gradient."""
    return average_gradients(compute_gradients(case, steps), steps)


def average_gradients(gradients: Tensor, steps: Sequence[Step]) -> Tensor:
    """`[P]` the mean of `[S, P]` gradients, each with its step's probability."""
    return gradients.new_tensor([step.probability for step in steps]) @ gradients


def measure_deviation(gradients: Tensor, steps: Sequence[Step], count: int, seed: int) -> float:
    """Largest difference between the expected gradient and the mean of drawn groups.

    Args:
        gradients: `[S, P]` of every step.
        steps: all steps of one prompt, which are multisets.
        count: groups to draw, one rollout after the other.
        seed: of the draws.

    Returns:
        The difference in standard errors of that mean, the largest of P.
    """
    random = torch.Generator().manual_seed(seed)
    size = len(steps[0].rollouts)
    weights = PROCESS.probabilities.expand(count, -1)
    drawn = torch.multinomial(weights, size, replacement=True, generator=random).sort(dim=1).values
    numbers = {step.rollouts: number for number, step in enumerate(steps)}
    found = gradients[[numbers[tuple(group)] for group in drawn.tolist()]]
    error = found.std(0) / count**0.5
    return float(
        ((found.mean(0) - average_gradients(gradients, steps)).abs() / error.clamp(min=1e-12)).max()
    )


def estimate_cosine(case: Case, steps: Sequence[Step], exact: Tensor) -> tuple[float, float]:
    """The cosine of the mean over drawn steps, and its standard error by the jackknife."""
    gradients = compute_gradients(case, steps)
    count = len(steps)
    means = (gradients.sum(0) - gradients) / (count - 1)
    cosines = torch.cosine_similarity(means, exact[None], dim=1)
    error = ((count - 1) / count * (cosines - cosines.mean()).square().sum()).sqrt()
    return float(torch.cosine_similarity(gradients.mean(0), exact, dim=0)), float(error)


class Comparison(NamedTuple):
    """A gradient beside the exact one: the cosine of their angle, and the ratio of their norms."""

    cosine: float
    ratio: float

    @property
    def is_unbiased(self) -> bool:
        """Whether both have the same direction; loss weights are in float32."""
        return self.cosine > 1 - 1e-10


def compare_gradients(gradient: Tensor, exact: Tensor) -> Comparison:
    """Compares an expected gradient with the exact one."""
    norm = gradient.norm()
    cosine = (gradient @ exact) / (norm * exact.norm()) if norm > 0 else norm
    return Comparison(float(cosine), float(norm / exact.norm()))
