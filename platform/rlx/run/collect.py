"""Collects the rollouts of a training step: samples, scores, and resamples those without signal."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlx.agents import build_rollout_host
from rlx.batch import build_token_batch, list_batch_rows
from rlx.credit import compute_group_extremes, has_score_spread, structured_scores
from rlx.credit_assignment import find_lost_rows, join_row_rewards
from rlx.model import Policy
from rlx.phase_setup import PhaseSetup
from rlx.plugin import Problem, Task
from rlx.plugin_calls import show_plugin_output
from rlx.reward import RewardTable, score_rollouts
from rlx.rollout import (
    DrawnProblems,
    PromptFit,
    RolloutPlan,
    RolloutTree,
    sample_rollout_trees,
)
from rlx.run.context import RunContext
from rlx.seeding import derive_seed

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ScoredTrees:
    """Trees with their rewards, of one rank or of all, and the seconds that this rank took."""

    trees: list[RolloutTree]
    table: RewardTable
    sampled: float
    scored: float


@dataclass(frozen=True, slots=True)
class StepRollouts(ScoredTrees):
    """All rollouts sampled for one step, in the order in which their problems were drawn.

    Attributes:
        greedy: one greedily sampled tree for each of `trees`; None if no estimator needs them.
        filtered: positions of trees excluded from training, because they carry no signal or came
            after there were enough.
        drawn: number of problems drawn, with those that were dropped for their length.
        dropped: how many problems were left out because their prompts were too long; None if
            nothing limits them.
        need_rewards: whether a rollout without a reward is not trained on.
    """

    greedy: ScoredTrees | None
    filtered: frozenset[int]
    drawn: int
    dropped: int | None = None
    need_rewards: bool = True

    def find_untrained_rows(self) -> set[Place]:
        """Rows excluded from training: unscored, dropped, filtered or without a greedy baseline."""
        out = find_lost_rows(self.trees, self.table, needs_reward=self.need_rewards)
        excluded = set(self.filtered)
        if self.greedy is not None:
            excluded |= {t for t, _ in find_lost_rows(self.greedy.trees, self.greedy.table)}
        return out | {
            (r.tree, r.segment) for r in list_batch_rows(self.trees) if r.tree in excluded
        }


def collect_rollouts(context: RunContext, setup: PhaseSetup, cursor: int) -> StepRollouts:
    """Draws, samples and scores the rollouts of a step.

    Dynamic sampling draws until `prompts_per_step` trees carry a signal or `max_batches` is
    reached. If no tree carries a signal, the step keeps its first draw. All ranks see all trees, so
    they make the same decision.

    Args:
        cursor: number of problems drawn before.
    """
    rollout = setup.spec.rollout
    count, dynamic = rollout.prompts_per_step, rollout.dynamic_sampling
    parcels: list[ScoredTrees] = []
    draws: list[DrawnProblems] = []
    good: list[int] = []
    examined = 0
    for batch in range(dynamic.max_batches if dynamic else 1):
        start = cursor + examined
        drawn, seeds = _draw_train_problems(context.policy, setup, start, count, "rollout")
        parcel = sample_and_score(context, setup, setup.plan, drawn.problems, seeds)
        good += [batch * count + t for t in _find_signal_trees(parcel)] if dynamic else []
        parcels.append(parcel)
        draws.append(drawn)
        examined += drawn.examined
        if len(good) >= count:
            break
    trees = [tree for parcel in parcels for tree in parcel.trees]
    numbers = iter(range(len(trees)))
    places = [[next(numbers) for _ in parcel.trees] for parcel in parcels]
    kept = set(good[:count]) or set(range(count * setup.plan.trees_per_prompt))
    everyone, greedy = list(parcels), None
    if "greedy_scores" in setup.needs:  # of each problem one tree of the most likely tokens
        plan = setup.plan.copy_with_sampling(1, top_k=1)
        problems = [problem for drawn in draws for problem in drawn.problems]
        seeds = [
            derive_seed(context.spec.seed, "greedy", n) for drawn in draws for n in drawn.numbers
        ]
        greedy = sample_and_score(context, setup, plan, problems, seeds)
        everyone.append(greedy)
    return StepRollouts(
        trees=trees,
        table=RewardTable.merge_tables([parcel.table for parcel in parcels], places),
        greedy=greedy,
        filtered=frozenset(range(len(trees))) - kept,
        drawn=examined,
        sampled=sum(parcel.sampled for parcel in everyone),
        scored=sum(parcel.scored for parcel in everyone),
        dropped=sum(drawn.dropped for drawn in draws) if rollout.max_prompt_tokens else None,
        need_rewards=setup.spec.learns_from_rewards,
    )


def _find_signal_trees(parcel: ScoredTrees) -> list[int]:
    """Trees that carry a signal: the scores of some group differ."""
    table = parcel.table
    without = find_lost_rows(parcel.trees, table)
    if len(without) == len(list_batch_rows(parcel.trees)):
        return []
    batch = build_token_batch(parcel.trees, without=without)
    rewards = join_row_rewards(batch, parcel.trees, table, batch.is_own).rewards
    scores = structured_scores(rewards.turn_rewards, rewards.turn_present, rewards.global_rewards)
    _, slot = batch.group_ids.unique(return_inverse=True)
    highest, lowest = compute_group_extremes(scores, slot, int(slot.max()) + 1)
    trees: list[int] = batch.tree_ids[has_score_spread(highest, lowest)[slot]].unique().tolist()
    return trees


def sample_and_score(
    context: RunContext,
    setup: PhaseSetup,
    plan: RolloutPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    show: Callable[[int], None] | None = None,
) -> ScoredTrees:
    """Samples and scores each rank's share; returns all trees, in the order of the problems.

    Args:
        show: called with how many problems are answered, as far as this rank's share tells.
    """
    turns = len(range(context.ranks.rank, len(problems), context.ranks.count)) * plan.most_turns
    ended = 0

    def show_answered(more: int) -> None:
        nonlocal ended
        ended += more
        if show is not None:
            show(min(len(problems), len(problems) * ended // turns))

    context.sampler.on_ended = None if show is None else show_answered
    share = _sample_own_share(context, setup, plan, problems, seeds)
    context.sampler.on_ended = None
    return _gather_shares(context, share, len(problems), plan.trees_per_prompt)


def _sample_own_share(
    context: RunContext,
    setup: PhaseSetup,
    plan: RolloutPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
) -> ScoredTrees:
    """Samples and scores this rank's problems: every `count`-th one, starting at its number."""
    began = time.perf_counter()
    mine = slice(context.ranks.rank, None, context.ranks.count)
    host = build_rollout_host(setup, context.pool, context.policy)
    context.progress.show_activity("generation")
    own, own_seeds, trees = problems[mine], seeds[mine], []
    dialogues, each = context.spec.sampler.dialogues_at_once, plan.continued_per_prompt
    at_once = max(1, dialogues // each) if dialogues is not None and each else None
    with context.cpu.measure("sample"), context.sampler.session() as session:
        for part in _split_evenly(len(own), at_once):
            trees += sample_rollout_trees(
                plan, own[part], own_seeds[part], session, context.policy.dialogue, host
            )
    sampled = time.perf_counter()
    context.progress.show_activity("scoring")
    with context.cpu.measure("score"):
        table = score_rollouts(trees, setup.rewards, context.pool)
    return ScoredTrees(trees, table, sampled - began, time.perf_counter() - sampled)


def _split_evenly(count: int, most: int | None) -> list[slice]:
    """Splits so many items into the fewest parts of at most `most`, of about the same size."""
    parts = 1 if most is None else max(1, -(-count // most))
    starts = [count * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def _gather_shares(
    context: RunContext, share: ScoredTrees, problems: int, trees: int
) -> ScoredTrees:
    shares = context.ranks.gather((share.trees, share.table))
    count = context.ranks.count
    merged = [
        shares[i % count][0][i // count * trees + t] for i in range(problems) for t in range(trees)
    ]
    numbers = [
        [i * trees + t for i in range(rank, problems, count) for t in range(trees)]
        for rank in range(count)
    ]
    joined = RewardTable.merge_tables([part for _, part in shares], numbers)
    return ScoredTrees(merged, joined, share.sampled, share.scored)


def build_prompt_fit(policy: Policy, setup: PhaseSetup) -> PromptFit:
    """Which problems of a phase the policy can be shown."""
    rule = setup.spec.rollout.max_prompt_tokens
    return PromptFit(setup.plan, policy.dialogue, policy.context_length, rule)


def draw_held_out_problems(
    fit: PromptFit, task: Task, seed: int, numbers: range, purpose: str
) -> tuple[DrawnProblems, list[int]]:
    """Draws held-out problems that fit the model, by their numbers, with a sampling seed for each
    that depends on `purpose`."""
    data = derive_seed(seed, "held out")
    with show_plugin_output(type(task).__name__):
        drawn = fit.draw_held_out(lambda number: task.problem("test", number, data), numbers)
    return drawn, [derive_seed(seed, purpose, number) for number in drawn.numbers]


def draw_contact_problems(
    policy: Policy, setup: PhaseSetup, count: int
) -> tuple[Sequence[Problem], list[int]]:
    """Draws the first training problems that fit the model, with a sampling seed for each."""
    drawn, seeds = _draw_train_problems(policy, setup, 0, count, "first contact")
    return drawn.problems, seeds


def _draw_train_problems(
    policy: Policy, setup: PhaseSetup, start: int, count: int, purpose: str
) -> tuple[DrawnProblems, list[int]]:
    seed, data = setup.spec.seed, derive_seed(setup.spec.seed, "train")
    with show_plugin_output(setup.spec.task.plugin):
        drawn = build_prompt_fit(policy, setup).draw_train(
            lambda number: setup.task.problem("train", number, data), start, count
        )
    return drawn, [derive_seed(seed, purpose, number) for number in drawn.numbers]
