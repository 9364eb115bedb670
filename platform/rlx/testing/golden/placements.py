"""Rewards of turns and rollouts: their sums, their placement on tokens, and KL in the reward."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlx.credit import (
    PlacedRewards,
    compute_discounted_returns,
    compute_gae_advantages,
    place_rewards,
    structured_scores,
    sum_masked_returns,
    sum_token_rewards,
)
from rlx.kl import AdaptiveKl, FixedKl, kl_terms, mean_kl, subtract_kl_penalty
from rlx.reward import RewardEntry, RewardTable
from rlx.spec import Placement
from rlx.testing.golden.family import RecordFamily, unpack_tensor
from rlx.testing.golden.record import GoldenRecord, MissingInputError, sum_named_rewards

__all__ = [
    "COMPOSITION",
    "CONTROLLER",
    "KL",
    "MASS",
    "PLACEMENT",
    "RETURNS_SCORE",
    "parse_turn_rewards",
]


# Composition ------------------------------------------------------------------------------------


def _build_reward_table(record: GoldenRecord) -> RewardTable:
    """Named rewards with their weights; an entry without a weight is not a reward."""
    weights, overall = record.get("turn_weights"), record.get("global_weights", default={})
    components = record.get("turn_components", "turns")
    return RewardTable(
        turns={
            (0, int(k)): _build_reward_entries(named, weights) for k, named in components.items()
        },
        dropped=frozenset(),
        faults={},
        rollouts={(0, 0): _build_reward_entries(record.get("raw_global", default={}), overall)},
    )


def _build_reward_entries(
    raw: Mapping[str, Any], weights: Mapping[str, float]
) -> dict[str, RewardEntry]:
    return {
        name: RewardEntry(name, float(raw[name]), weight, "scored")
        for name, weight in weights.items()
        if raw.get(name) is not None
    }


def _turn_rewards(record: GoldenRecord, name: str) -> dict[str, float]:
    table = _build_reward_table(record)
    return {str(k): table.get_turn_total((tree, k)) or 0.0 for tree, k in table.turns}


def _global_rewards(record: GoldenRecord, name: str) -> dict[str, float]:
    entries = _build_reward_table(record).rollouts[0, 0].values()
    return {e.name: e.weight * e.raw for e in entries if e.raw is not None}


def _compute_composition_output(record: GoldenRecord, name: str) -> float:
    """The mean, sum or total, depending on the output's name."""
    turns = list(_turn_rewards(record, name).values())
    overall = sum_named_rewards(_global_rewards(record, name))
    return {
        "turn_mean": lambda: _compute_total_score(turns, 0.0),
        "global_sum": lambda: _compute_total_score([], overall),
        "total_score": lambda: _compute_total_score(turns, overall),
    }[name]()


def _compute_total_score(turns: list[float], overall: float) -> float:
    rewards = torch.tensor([turns], dtype=torch.float64)
    present = torch.ones_like(rewards, dtype=torch.bool)
    return float(structured_scores(rewards, present, torch.tensor([overall]).double()))


def _compute_rule_total(record: GoldenRecord, name: str) -> float:
    """total_score of one set of global rewards, under one exclusion rule."""
    source = "reference" if name.startswith("reference") else "seed"
    rewards = record.get(f"global_rewards_{source}", "global_rewards")
    rule = {"raw": "_raw_", "all": ""}.get(name.rpartition("_")[2], "_")
    return _compute_total_score(
        list(record.get("turn_rewards").values()), sum_named_rewards(rewards, rule)
    )


COMPOSITION = RecordFamily(
    frozenset({"g01", "g02"}),
    lambda r: r.has("turn_components", "global_rewards_seed", "global_rewards_reference"),
    {
        "turn_rewards": _turn_rewards,
        "global_rewards": _global_rewards,
        "turn_mean|global_sum": _compute_composition_output,
        "total_score": lambda r, n: (
            _compute_composition_output if r.has("turn_components") else _compute_rule_total
        )(r, n),
        ".*(sum_all|exclude_underscore|exclude_only_raw)": _compute_rule_total,
    },
)


# Placement --------------------------------------------------------------------------------------


def parse_turn_rewards(rewards: Any) -> dict[int, float]:
    """Rewards by turn number; keys may be numbers or strings, and a list begins with turn 1."""
    if isinstance(rewards, Mapping):
        return {int(k): float(v) for k, v in rewards.items() if not str(k).startswith("_")}
    return dict(enumerate(map(float, rewards or ()), start=1))


def _select_placement(record: GoldenRecord, name: str) -> Placement:
    """Determined by the output's name, then the record's settings, then its inputs."""
    setting = str(record.get("placement", "strategy", default=""))
    words: dict[Placement, str] = {
        "turn_proportional": "proportional|turn_prop",
        "final_token_only": "final",
        "turn_end": "turn_end",
    }
    for text in (name, setting, record.searchable_text):
        for placement, pattern in words.items():
            if re.search(pattern, text):
                return placement
    return "turn_proportional" if record.has("turn_ids") else "final_token_only"


def _build_record_rows(record: GoldenRecord, name: str) -> list[Mapping[str, Any]]:
    """Each row's rewards, ids and mask. Some outputs specify what their row lacks."""
    own = record.inputs.get(name)
    source = own if isinstance(own, Mapping) else record.inputs
    samples = record.get("samples", "rows", "batch", default=[{}])
    rows: list[Mapping[str, Any]] = [{**record.config, **source, **s} for s in samples]
    if any(word in name for word in ("no_valid", "no_token", "all_masked", "empty_mask")):
        rows = [{**row, "loss_mask": [0] * _get_row_width(row)} for row in rows]
    if any(word in name for word in ("global_only", "only_global", "no_turn")):
        rows = [{**row, "turn_rewards": {}} for row in rows]
    if any(word in name for word in ("missing", "no_entry", "absent")) and source is not own:
        rows = [{**row, "turn_rewards": {}, "global_rewards": {}} for row in rows]
    return rows


def _get_row_width(row: Mapping[str, Any]) -> int:
    for key in ("loss_mask", "response_mask", "mask", "turn_ids"):
        if key in row:
            return len(row[key])
    if "response_len" in row:
        return int(row["response_len"])
    raise MissingInputError("no loss_mask or turn_ids among its inputs")


def _get_row_mask(row: Mapping[str, Any]) -> list[int]:
    for key in ("loss_mask", "response_mask", "mask"):
        if key in row:
            return list(row[key])
    return [int(turn > 0) for turn in row["turn_ids"]]


def _place_record_rewards(record: GoldenRecord, name: str) -> tuple[PlacedRewards, Tensor]:
    rows = _build_record_rows(record, name)
    exclude = record.get("exclude_prefix", default="_")
    turns = [parse_turn_rewards(row.get("turn_rewards")) for row in rows]
    count = max((max(row, default=0) for row in turns), default=0)
    numbers = range(1, count + 1)
    mask = torch.tensor([_get_row_mask(row) for row in rows]).bool()
    ids = [row.get("turn_ids", [1] * _get_row_width(row)) for row in rows]
    overall = [sum_named_rewards(row.get("global_rewards") or {}, exclude) for row in rows]
    shape = (len(rows), count)
    placed = place_rewards(
        torch.tensor([[row.get(k, 0.0) for k in numbers] for row in turns]).double().view(shape),
        torch.tensor([[k in row for k in numbers] for row in turns]).bool().view(shape),
        torch.tensor(overall, dtype=torch.float64),
        torch.tensor(ids),
        mask,
        placement=_select_placement(record, name),
        on_missing_turn=record.get("on_missing_turn", default="drop"),
    )
    return placed, mask


def _token_level(record: GoldenRecord, name: str) -> Any:
    tokens = _place_record_rewards(record, name)[0].token_rewards
    return unpack_tensor(tokens) if record.has("samples", "rows", "batch") else tokens[0].tolist()


def _unpack_row_values(record: GoldenRecord, values: Tensor) -> Any:
    return values.tolist() if record.has("samples", "rows", "batch") else values[0].item()


def _compute_reward_mass(record: GoldenRecord, name: str) -> Any:
    placed, mask = _place_record_rewards(record, name)
    return _unpack_row_values(record, sum_token_rewards(placed.token_rewards, mask))


def _compute_lost_reward(record: GoldenRecord, name: str) -> Any:
    return _unpack_row_values(record, _place_record_rewards(record, name)[0].lost)


PLACEMENT = RecordFamily(
    frozenset({"g03", "g04", "g05", "g06"}),
    lambda r: r.has("turn_rewards", "global_rewards") and r.has("loss_mask", "turn_ids"),
    {
        "(.*_)?(dropped|lost)": _compute_lost_reward,
        "(.*_)?(sum|total|mass)": _compute_reward_mass,
        ".*": _token_level,
    },
)


def _compute_mass_rows(record: GoldenRecord, name: str) -> list[dict[str, Any]]:
    """Reward mass of rollouts with a growing number of perfect turns, three tokens each."""
    rows = []
    for turns in (row["turns"] for row in record.outputs[name]):  # the turn counts are inputs
        one = GoldenRecord(
            record.id,
            {
                "turn_rewards": {k: record.get("per_turn") for k in range(1, turns + 1)},
                "global_rewards": record.get("global_rewards", default={}),
                "turn_ids": [k for k in range(1, turns + 1) for _ in range(3)],
            },
            {},
        )
        rules = ("turn_proportional_sum", "final_token_only_sum", "turn_end_sum")
        rows.append({"turns": turns} | {rule: _compute_reward_mass(one, rule) for rule in rules})
    return rows


MASS = RecordFamily(frozenset({"g08"}), lambda r: r.has("per_turn"), {"rows": _compute_mass_rows})


# KL in the reward -------------------------------------------------------------------------------

_OLD = ("old_log_probs", "old_logprobs", "old_log_prob")
_REFERENCE = ("ref_log_probs", "reference_logprobs", "ref_log_prob")


def _compute_kl_output(record: GoldenRecord, name: str) -> dict[str, Any]:
    old, reference, mask = record.tokens(*_OLD), record.tokens(*_REFERENCE), record.mask()
    kind: Any = {"low_var_kl": "k3", "mse": "k2", "kl": "k1"}.get(name, name)
    terms = torch.where(mask, kl_terms(old, reference, kind), 0.0)
    like = record.get(*_OLD)
    beta = record.get("beta", "kl_coef")

    def penalize_rewards(placement: str) -> Any:
        tokens = _place_record_rewards(record, placement)[0].token_rewards
        kept = subtract_kl_penalty(tokens, old, reference, mask, beta=beta, kind=kind)
        return unpack_tensor(kept, like)

    values = {"kld": unpack_tensor(terms, like), "mean_kl": mean_kl(terms, mask).item()}
    if record.has("turn_rewards", "global_rewards"):
        values["token_level_rewards_turn_prop"] = penalize_rewards("turn_proportional")
        values["token_level_rewards_final"] = penalize_rewards("final_token_only")
    return values


KL = RecordFamily(
    frozenset({"g07"}),
    lambda r: r.has(*_OLD) and r.has(*_REFERENCE),
    {"k1|kl|abs|k2|mse|k3|low_var_kl": _compute_kl_output, "scores.*": _token_level},
)


def _compute_beta_sequence(record: GoldenRecord, name: str) -> list[float]:
    beta = record.get("init", "init_kl_coef", "beta")
    controller: AdaptiveKl | FixedKl = FixedKl(beta=beta)
    if record.has("target", "target_kl"):
        controller = AdaptiveKl(
            beta=beta,
            target=record.get("target", "target_kl"),
            horizon=record.get("horizon", "kl_horizon"),
        )
    betas = [controller.beta]
    for current in record.get("current_kl"):
        controller = controller.update(current, record.get("n_steps", "steps"))
        betas.append(controller.beta)
    return betas


CONTROLLER = RecordFamily(
    frozenset({"g37"}), lambda r: r.has("current_kl"), {"betas?": _compute_beta_sequence}
)


# KG-R1's score -----------------------------------------------------------------------------------


def _returns_score(record: GoldenRecord, name: str) -> Any:
    """Σ returns over the mask. With λ = 1 it does not depend on values, which may be omitted."""
    rewards, mask = (
        _final_rewards(record) if record.has("R", "reward") else _get_token_rewards(record)
    )
    gamma = record.get("gamma", default=1.0)
    if record.has("values"):
        lam = record.get("lam", "gae_lambda", default=1.0)
        _, returns = compute_gae_advantages(
            rewards, record.tokens("values"), mask, gamma=gamma, lam=lam, environment="literal"
        )
    else:
        returns = compute_discounted_returns(rewards, mask, gamma=gamma)
    if "returns" in name and "score" not in name and "sum" not in name:
        return unpack_tensor(returns, record.get("loss_mask", "mask", default=[0]))
    sums = sum_masked_returns(returns, mask)
    return sums.tolist() if len(sums) > 1 else sums.item()


def _get_token_rewards(record: GoldenRecord) -> tuple[Tensor, Tensor]:
    return record.tokens("token_level_rewards", "token_level_scores", "rewards"), record.mask()


def _final_rewards(record: GoldenRecord) -> tuple[Tensor, Tensor]:
    """R on the last of n_valid tokens."""
    scores = torch.atleast_1d(record.tensor("R", "reward"))
    if record.has("loss_mask", "response_mask", "mask"):
        mask = record.mask()
    else:
        lengths = torch.atleast_1d(torch.tensor(record.get("n_valid", "length", "lengths")))
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
    nothing = torch.zeros(len(scores), 0, dtype=torch.float64)
    ids = torch.ones(mask.shape, dtype=torch.int64)
    placed = place_rewards(nothing, nothing.bool(), scores, ids, mask, placement="final_token_only")
    return placed.token_rewards, mask


RETURNS_SCORE = RecordFamily(
    frozenset({"g15"}),
    lambda r: r.has("n_valid") or "returns over the mask" in r.searchable_text,
    {
        ".*score.*|.*sum.*|.*returns.*|n_valid_times_r": _returns_score,
    },
)
