"""Advantages: along tokens, between rollouts, turns and trees."""

import re
from typing import Any

import torch
from torch import Tensor

from rlx.credit import group_advantages, spread_over_mask, structured_scores
from rlx.credit.group import GroupAdvantageSettings
from rlx.credit.outcome import (
    compute_gpg_advantages,
    compute_opo_advantages,
    compute_pass_at_k_advantages,
    compute_remax_advantages,
    compute_rloo_advantages,
)
from rlx.credit.returns import (
    compute_discounted_returns,
    compute_gae_advantages,
    compute_turn_gae_advantages,
    whiten_values,
)
from rlx.credit.turns import (
    compute_gigpo_advantages,
    compute_mt_grpo_advantages,
    compute_multiturn_grpo_advantages,
    compute_tree_grpo_advantages,
)
from rlx.testing.golden.family import RecordFamily, unpack_masked_tensor, unpack_tensor
from rlx.testing.golden.placements import parse_turn_rewards
from rlx.testing.golden.record import GoldenRecord, assign_integer_ids, sum_named_rewards

__all__ = [
    "BI_LEVEL",
    "GAE",
    "GIGPO",
    "GROUPS",
    "MT_GRPO",
    "MULTITURN",
    "OUTCOME",
    "REINFORCE",
    "TREE",
    "UNIFORM",
]

_REWARDS = ("token_level_rewards", "token_rewards", "rewards")
_LAM = ("lam", "gae_lambda", "lambda")


def _get_statistics_settings(record: GoldenRecord) -> GroupAdvantageSettings:
    """Conventions that a record names; a group of one has its raw score, as in the reference."""
    return {
        "ddof": record.get("ddof", "std_ddof", default=1),
        "eps": record.get("eps", default=1e-6),
        "singleton": record.get("singleton", default="raw"),
    }


# Along tokens -----------------------------------------------------------------------------------


def _compute_gae_output(record: GoldenRecord, name: str) -> Any:
    """The literal recursion, unless the output's name says that environment tokens are skipped."""
    like, mask = record.get(*_REWARDS), record.mask()
    skips = any(word in name for word in ("skip", "verl", "masked"))
    advantages, returns = compute_gae_advantages(
        record.tokens(*_REWARDS),
        record.tokens("values"),
        mask,
        gamma=record.get("gamma", default=1.0),
        lam=record.get(*_LAM, default=1.0),
        environment="skip" if skips else "literal",
    )
    if "whiten" in name:
        return unpack_masked_tensor(whiten_values(advantages, mask), mask, like)
    return unpack_masked_tensor(returns if "return" in name else advantages, mask, like)


GAE = RecordFamily(
    frozenset({"g09", "g10"}),
    lambda r: r.has("values") and not r.has("turn_end", "high_level_gamma"),
    {".*(adv|return|whiten).*": _compute_gae_output},
)


def _bi_level(record: GoldenRecord, name: str) -> Any:
    like, mask = record.get(*_REWARDS), record.mask()
    ends = record.tokens("turn_end", "turn_ends").bool()
    rewards, values = record.tokens(*_REWARDS), record.tokens("values")
    token = {"gamma": record.get("gamma", default=1.0), "lam": record.get(*_LAM, default=1.0)}
    if "token_gae" in name:
        return unpack_masked_tensor(
            compute_gae_advantages(rewards, values, mask, **token)[0], mask, like
        )
    told = re.search(r"gamma_([0-9.]+)$", name)
    high = record.get("high_level_gamma", "gamma_high")
    advantages, returns = compute_turn_gae_advantages(
        rewards,
        values,
        mask,
        ends.cumsum(dim=1) - ends.long() + 1,
        **token,
        gamma_high=float(told[1]) if told else high,
        lam_high=record.get("high_level_lam", "lam_high", default=token["lam"]),
    )
    if name.startswith("turn_adv"):
        return unpack_tensor(torch.where(ends, advantages, 0.0), like)
    return unpack_masked_tensor(returns if "return" in name else advantages, mask, like)


BI_LEVEL = RecordFamily(
    frozenset({"g35"}),
    lambda r: r.has("turn_end", "turn_ends"),
    {"token_gae.*|turn_adv.*|advantages.*|returns.*": _bi_level},
)


def _compute_reinforce_output(record: GoldenRecord, name: str) -> Any:
    """REINFORCE++: discounted rewards to come, or centred scores; whitened over the batch."""
    mask = record.mask()
    based = "baseline" in name or "center" in name or "mean" in name
    if based:
        scores = (
            record.tensor("scores", "outcome")
            if record.has("scores", "outcome")
            else record.tokens(*_REWARDS).sum(dim=1)
        )
        groups = record.groups(len(scores))
        per_row = group_advantages(scores, groups, normalize="center")
        if re.search("center|mean|minus", name) and "whiten" not in name and "adv" not in name:
            return per_row.tolist()
        tokens = spread_over_mask(per_row, mask)
    else:
        gamma = record.get("gamma", default=1.0)
        tokens = compute_discounted_returns(record.tokens(*_REWARDS), mask, gamma=gamma)
    raw = "return" in name and "whiten" not in name
    like = record.get("loss_mask", "response_mask", "mask", "eos_mask")
    return unpack_masked_tensor(tokens if raw else whiten_values(tokens, mask), mask, like)


REINFORCE = RecordFamily(
    frozenset({"g36"}),
    lambda r: "reinforce" in r.searchable_text,
    {".*(return|adv|whiten|baseline|reinforce|rfpp|rpp|center|mean).*": _compute_reinforce_output},
)


# Between rollouts -------------------------------------------------------------------------------

_SCORES = ("scores", "acc_reward", "rewards", "conf_reward", "brier", "outcome_reward")


def _get_group_options(record: GoldenRecord, name: str) -> dict[str, Any]:
    """Options of `group_advantages` as the output's name says, else as the record does."""
    options: dict[str, Any] = {**_get_statistics_settings(record)}
    if told := re.search(r"ddof_?([01])", name):
        options["ddof"] = int(told[1])
    if told := re.search(r"(\d(?:\.\d+)?)e-?(\d+)", name):
        options["eps"] = float(f"{told[1]}e-{told[2]}")
    if told := re.search(r"singleton_(zero|raw)", name):
        options["singleton"] = told[1]
    if re.search("cent(er|re)", name) or "dr_grpo" in name:
        options["normalize"] = "center"
    return options


def _get_group_scores(record: GoldenRecord, name: str) -> Tensor:
    """The record's scores; an output that names a group of its own has those."""
    own = record.inputs.get(name)
    scores = record.tensor(name) if isinstance(own, list) else record.tensor(*_SCORES)
    if "all_correct" in name:
        return torch.ones_like(scores)
    return torch.zeros_like(scores) if "all_wrong" in name else scores


def _compute_group_output(record: GoldenRecord, name: str) -> Any:
    scores = _get_group_scores(record, name)
    return group_advantages(
        scores, record.groups(len(scores)), **_get_group_options(record, name)
    ).tolist()


def _compute_score_mean(record: GoldenRecord, name: str) -> float:
    scores = record.tensor(*_SCORES)
    centred = group_advantages(scores, torch.zeros(len(scores)).long(), normalize="center")
    return (scores - centred)[0].item()


def _compute_score_deviation(record: GoldenRecord, name: str) -> float:
    """What scores are divided by."""
    scores, one = record.tensor(*_SCORES), torch.zeros(len(record.get(*_SCORES))).long()
    ddof = 0 if "pop" in name else 1
    centred = group_advantages(scores, one, normalize="center")
    divided = group_advantages(scores, one, ddof=ddof, eps=0.0)
    largest = centred.abs().argmax()
    return 0.0 if centred[largest] == 0 else (centred / divided)[largest].item()


GROUPS = RecordFamily(
    frozenset({"g11", "g21"}),
    lambda r: (r.has("uid", "uids") and r.has("scores")) or r.has("acc_reward"),
    {
        "mu|mean": _compute_score_mean,
        "sigma.*": _compute_score_deviation,
        "all_correct.*|all_wrong.*": _compute_group_output,
        ".*(ddof|center|centre|singleton|eps|adv|grpo).*": _compute_group_output,
    },
)


def _compute_outcome_output(record: GoldenRecord, name: str) -> list[float]:
    scores = record.tensor("scores")
    groups = record.groups(len(scores))
    how = _get_statistics_settings(record)
    match name.lower():
        case "rloo" | "rloo_explicit":
            advantages = compute_rloo_advantages(scores, groups)
        case "opo":
            advantages = compute_opo_advantages(scores, record.tensor("lengths"), groups)
        case "remax":
            advantages = compute_remax_advantages(
                scores, record.tensor("greedy_baseline", "greedy_scores")
            )
        case "gpg":
            advantages = compute_gpg_advantages(scores, groups, alpha="scores")
        case "grpo_passk" | "pass_at_k" | "passk":
            advantages = compute_pass_at_k_advantages(
                scores, groups, ddof=how["ddof"], eps=how["eps"]
            )
        case _:
            advantages = group_advantages(scores, groups, **_get_group_options(record, name))
    return advantages.tolist()


OUTCOME = RecordFamily(
    frozenset({"g30"}),
    lambda r: r.has("scores") and r.has("greedy_baseline", "greedy_scores", "lengths"),
    {
        "grpo|dr_grpo|rloo|rloo_explicit|opo|remax|gpg|grpo_passk|pass_at_k|passk": (
            _compute_outcome_output
        )
    },
)


# Turns ------------------------------------------------------------------------------------------


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
    said = str(record.get("statistics", "pool", default="")).lower()
    return "per_turn" in name or ("pooled" not in name and "per" in said and "turn" in said)


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
        **_get_statistics_settings(record),
    )
    return tokens.tolist()


def _turn_advantages(record: GoldenRecord, name: str) -> list[float]:
    rewards, present, _, _, groups = _build_sample_tensors(record)
    keys = groups[:, None].expand_as(present)
    if _per_turn(record, name):
        keys = keys * present.shape[1] + torch.arange(present.shape[1])
    advantages = group_advantages(
        rewards[present], keys[present], **_get_statistics_settings(record)
    )
    return advantages.tolist()


def _turn_entries(record: GoldenRecord, name: str) -> list[list[Any]]:
    rewards, present, *_ = _build_sample_tensors(record)
    return [[i, str(k + 1), rewards[i, k].item()] for i, k in present.nonzero().tolist()]


def _global_advantages(record: GoldenRecord, name: str) -> list[float]:
    _, _, overall, _, groups = _build_sample_tensors(record)
    return group_advantages(overall, groups, **_get_statistics_settings(record)).tolist()


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
    """mean(turn) + Σ global, normalised in the group; on tokens where its name or form asks so."""
    rewards, present, overall, ids, groups = _build_sample_tensors(record)
    scores = structured_scores(rewards, present, overall)
    if re.search("score|total|reward", name):
        return scores.tolist()
    advantages = group_advantages(scores, groups, **_get_group_options(record, name))
    asked = record.outputs[name]
    on_tokens = "token" in name or (asked and isinstance(asked[0], list))
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
    how: GroupAdvantageSettings = {**_get_statistics_settings(record), "singleton": "zero"}
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
    how: Any = {**_get_statistics_settings(record), **_get_group_options(record, name)}
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
