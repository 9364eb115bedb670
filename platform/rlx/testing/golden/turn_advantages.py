"""Advantages of turns, states and trees."""

import re
from typing import Any

import torch
from torch import Tensor

from rlx.credit import (
    GroupAdvantageSettings,
    compute_gigpo_advantages,
    compute_mt_grpo_advantages,
    compute_multiturn_grpo_advantages,
    compute_tree_grpo_advantages,
    group_advantages,
    spread_over_mask,
    structured_scores,
)
from rlx.testing.golden.advantages import get_group_options, get_statistics_settings
from rlx.testing.golden.family import RecordFamily
from rlx.testing.golden.placements import parse_turn_rewards
from rlx.testing.golden.record import GoldenRecord, assign_integer_ids, sum_named_rewards

__all__ = ["GIGPO", "MT_GRPO", "MULTITURN", "TREE", "UNIFORM"]


def _build_sample_tensors(record: GoldenRecord) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rewards and presence `[B, K]`, global sums `[B]`, turn ids `[B, T]`, group ids `[B]`."""
    samples = record.get("samples")
    turns = [parse_turn_rewards(sample.get("turn_rewards")) for sample in samples]
    numbers = range(1, max((max(row, default=0) for row in turns), default=0) + 1)
    shape = (len(samples), len(numbers))
    rewards = torch.tensor([[row.get(k, 0.0) for k in numbers] for row in turns]).double()
    present = torch.tensor([[k in row for k in numbers] for row in turns]).bool()
    overall = [sum_named_rewards(s.get("global_rewards") or {}) for s in samples]
    widest = max(len(s["turn_ids"]) for s in samples)
    ids = [[*s["turn_ids"], *[-1] * (widest - len(s["turn_ids"]))] for s in samples]
    groups = assign_integer_ids(s.get("uid", 0) for s in samples)
    sums = torch.tensor(overall, dtype=torch.float64)
    return rewards.view(shape), present.view(shape), sums, torch.tensor(ids), groups


def _per_turn(record: GoldenRecord, name: str) -> bool:
    setting = str(record.get("statistics", "pool", default="")).lower()
    return "per_turn" in name or ("pooled" not in name and "per" in setting and "turn" in setting)


def _compute_multiturn_output(record: GoldenRecord, name: str) -> list[list[float]]:
    rewards, present, overall, ids, groups = _build_sample_tensors(record)
    tokens = compute_multiturn_grpo_advantages(
        rewards,
        present,
        overall,
        ids,
        ids > 0,
        groups,
        statistics="per_turn" if _per_turn(record, name) else "pooled",
        turn_weight=record.get("turn_coef", "turn_weight", default=0.5),
        **get_statistics_settings(record),
    )
    return tokens.tolist()


def _turn_advantages(record: GoldenRecord, name: str) -> list[float]:
    rewards, present, _, _, groups = _build_sample_tensors(record)
    keys = groups[:, None].expand_as(present)
    if _per_turn(record, name):
        keys = keys * present.shape[1] + torch.arange(present.shape[1])
    advantages = group_advantages(
        rewards[present], keys[present], **get_statistics_settings(record)
    )
    return advantages.tolist()


def _turn_entries(record: GoldenRecord, name: str) -> list[list[Any]]:
    rewards, present, *_ = _build_sample_tensors(record)
    return [[i, str(k + 1), rewards[i, k].item()] for i, k in present.nonzero().tolist()]


def _global_advantages(record: GoldenRecord, name: str) -> list[float]:
    _, _, overall, _, groups = _build_sample_tensors(record)
    return group_advantages(overall, groups, **get_statistics_settings(record)).tolist()


MULTITURN = RecordFamily(
    frozenset({"g12", "g13"}),
    lambda r: r.has("samples") and "uniform" not in r.searchable_text,
    {
        "global_sums": lambda r, n: _build_sample_tensors(r)[2].tolist(),
        "global_adv.*": _global_advantages,
        "turn_entries": _turn_entries,
        "turn_adv.*": _turn_advantages,
        "token_adv.*|advantages|returns": _compute_multiturn_output,
    },
)


def _compute_uniform_output(record: GoldenRecord, name: str) -> Any:
    """mean(turn) + Σ global, normalised in the group; per token if the output's name or form is."""
    rewards, present, overall, ids, groups = _build_sample_tensors(record)
    scores = structured_scores(rewards, present, overall)
    if re.search("score|total|reward", name):
        return scores.tolist()
    advantages = group_advantages(scores, groups, **get_group_options(record, name))
    expected = record.outputs[name]
    on_tokens = "token" in name or (expected and isinstance(expected[0], list))
    return (spread_over_mask(advantages, ids > 0) if on_tokens else advantages).tolist()


UNIFORM = RecordFamily(
    frozenset({"g14"}),
    lambda r: r.has("samples") and "uniform" in r.searchable_text,
    {
        "turn_means?": lambda r, n: structured_scores(
            *_build_sample_tensors(r)[:2], torch.zeros(len(r.get("samples"))).double()
        ).tolist(),
        "global_sums": lambda r, n: _build_sample_tensors(r)[2].tolist(),
        ".*(score|total|reward|adv|return|uniform).*": _compute_uniform_output,
    },
)


def _mt_grpo(record: GoldenRecord, name: str) -> list[float]:
    turns, outcomes = record.tensor("turn_reward"), record.tensor("outcome_reward")
    groups = record.groups(len(turns))
    how: GroupAdvantageSettings = {**get_statistics_settings(record), "singleton": "zero"}
    if name in ("turn_adv", "outcome_adv"):
        scores = turns if name == "turn_adv" else outcomes
        return group_advantages(scores, groups, **how).tolist()
    ids = torch.tensor([[1, 2]]).expand(len(turns), 2)
    everything = torch.ones(ids.shape, dtype=torch.bool)
    coefficient = record.get("turn_coef", default=1.0)
    tokens = compute_mt_grpo_advantages(
        turns,
        everything[:, 0],
        outcomes,
        ids,
        everything,
        groups,
        turn_coef=coefficient,
        **how,
    )
    return tokens[:, 0 if "first" in name else 1].tolist()


MT_GRPO = RecordFamily(
    frozenset({"g31"}),
    lambda r: r.has("turn_reward") and r.has("outcome_reward"),
    {"turn_adv|outcome_adv|first_turn.*|later.*": _mt_grpo},
)


def _compute_gigpo_output(record: GoldenRecord, name: str) -> list[float]:
    scores, returns = record.tensor("episode_score"), record.tensor("step_return")
    states, groups = assign_integer_ids(record.get("anchor_state")), record.groups(len(scores))
    how: Any = {"normalize": "std" if "std" in str(record.get("mode", default="")) else "center"}
    how |= {"ddof": record.get("ddof", default=1), "eps": record.get("eps", default=1e-6)}
    if name == "episode_adv":
        return group_advantages(scores, groups, **how).tolist()
    if name == "step_adv":
        keys = groups * (int(states.max()) + 1) + states
        return group_advantages(returns, keys, **how).tolist()
    ones = torch.ones(len(scores), 1)
    weight = record.get("w", "omega", "step_advantage_w", default=1.0)
    where = (states[:, None], ones.long(), ones.bool(), groups)
    return compute_gigpo_advantages(scores, returns[:, None], *where, omega=weight, **how)[
        :, 0
    ].tolist()


GIGPO = RecordFamily(
    frozenset({"g32"}),
    lambda r: r.has("episode_score") and r.has("anchor_state"),
    {"episode_adv|step_adv|total|advantages?": _compute_gigpo_output},
)


def _compute_tree_output(record: GoldenRecord, name: str) -> list[float]:
    scores = record.tensor("scores", "leaf_scores", "leaf_rewards", "rewards", "leaf_reward")
    groups = record.groups(len(scores))
    trees = assign_integer_ids(record.get("tree_ids", "tree_id", "tree", "trees"))
    how: Any = {**get_statistics_settings(record), **get_group_options(record, name)}
    how["singleton"] = record.get("singleton", default="zero")
    if "inter" in name:
        advantages = group_advantages(scores, groups, **how)
    elif "intra" in name:
        keys = groups * (int(trees.max()) + 1) + trees
        advantages = group_advantages(scores, keys, **how)
    else:
        advantages = compute_tree_grpo_advantages(scores, groups, trees, **how)
    return advantages.tolist()


TREE = RecordFamily(
    frozenset({"g33"}),
    lambda r: r.has("tree_ids", "tree_id", "tree", "trees"),
    {".*(inter|intra|total|adv|sum|tree).*": _compute_tree_output},
)
