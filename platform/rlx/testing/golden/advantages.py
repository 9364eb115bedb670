"""Advantages per token, and between rollouts, turns and trees."""

import re
from typing import Any

import torch
from torch import Tensor

from rlx.credit import (
    GroupAdvantageSettings,
    compute_discounted_returns,
    compute_gae_advantages,
    compute_gpg_advantages,
    compute_opo_advantages,
    compute_pass_at_k_advantages,
    compute_remax_advantages,
    compute_rloo_advantages,
    compute_turn_gae_advantages,
    group_advantages,
    spread_over_mask,
    whiten_values,
)
from rlx.testing.golden.family import RecordFamily, unpack_masked_tensor, unpack_tensor
from rlx.testing.golden.record import GoldenRecord

__all__ = ["BI_LEVEL", "GAE", "GROUPS", "OUTCOME", "REINFORCE"]

_REWARDS = ("token_level_rewards", "token_rewards", "rewards")
_LAM = ("lam", "gae_lambda", "lambda")


def get_statistics_settings(record: GoldenRecord) -> GroupAdvantageSettings:
    """The record's conventions; a group of one keeps its raw score, as in the reference."""
    return {
        "ddof": record.get("ddof", "std_ddof", default=1),
        "eps": record.get("eps", default=1e-6),
        "singleton": record.get("singleton", default="raw"),
    }


# Per token ---------------------------------------------------------------------------------------


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
    match = re.search(r"gamma_([0-9.]+)$", name)
    high = record.get("high_level_gamma", "gamma_high")
    advantages, returns = compute_turn_gae_advantages(
        rewards,
        values,
        mask,
        ends.cumsum(dim=1) - ends.long() + 1,
        **token,
        gamma_high=float(match[1]) if match else high,
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
    """REINFORCE++: discounted returns, or centred scores; whitened over the batch."""
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


def get_group_options(record: GoldenRecord, name: str) -> dict[str, Any]:
    """Options of `group_advantages` from the output's name, otherwise from the record."""
    options: dict[str, Any] = {**get_statistics_settings(record)}
    if match := re.search(r"ddof_?([01])", name):
        options["ddof"] = int(match[1])
    if match := re.search(r"(\d(?:\.\d+)?)e-?(\d+)", name):
        options["eps"] = float(f"{match[1]}e-{match[2]}")
    if match := re.search(r"singleton_(zero|raw)", name):
        options["singleton"] = match[1]
    if re.search("cent(er|re)", name) or "dr_grpo" in name:
        options["normalize"] = "center"
    return options


def _get_group_scores(record: GoldenRecord, name: str) -> Tensor:
    """The record's scores, or those of the group that the output names."""
    own = record.inputs.get(name)
    scores = record.tensor(name) if isinstance(own, list) else record.tensor(*_SCORES)
    if "all_correct" in name:
        return torch.ones_like(scores)
    return torch.zeros_like(scores) if "all_wrong" in name else scores


def _compute_group_output(record: GoldenRecord, name: str) -> Any:
    scores = _get_group_scores(record, name)
    return group_advantages(
        scores, record.groups(len(scores)), **get_group_options(record, name)
    ).tolist()


def _compute_score_mean(record: GoldenRecord, name: str) -> float:
    scores = record.tensor(*_SCORES)
    centred = group_advantages(scores, torch.zeros(len(scores)).long(), normalize="center")
    return (scores - centred)[0].item()


def _compute_score_deviation(record: GoldenRecord, name: str) -> float:
    """The deviation by which scores are divided."""
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
    how = get_statistics_settings(record)
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
            advantages = group_advantages(scores, groups, **get_group_options(record, name))
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
