"""Confidence rewards and their advantages, as in RLCR in two turns (RLCR: arXiv 2507.16806)."""

import math
import re
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from rlx.credit import ema_scale, group_advantages, prompt_scale, spread_over_mask
from rlx.plugin import Sample
from rlx.testing.golden.family import RecordFamily
from rlx.testing.golden.record import GoldenRecord, MissingInputError
from rlx_plugins.rlcr import Brier

__all__ = ["BRIER", "FIELD", "PROJECTION", "RLCR", "SECOND_LEVEL", "SIBLINGS"]


# Rewards ----------------------------------------------------------------------------------------


def brier_reward(correct: float, confidence: Any, *, format_ok: bool = True) -> float:
    """rlx's reward for a response with this confidence; a malformed response lacks its end."""
    number = isinstance(confidence, int | float) and math.isfinite(confidence)
    stated = format(Decimal(repr(confidence)), "f") if number else confidence
    closing = "</confidence>" if format_ok else ""
    text = "" if confidence is None else f"<confidence>{stated}{closing}"
    sample = Sample(id="golden", problem={}, turn="confidence", number=2, response=text, of=correct)
    return Brier().score(sample).value


def _select_input_columns(record: GoldenRecord, name: str, *columns: str) -> list[dict[str, Any]]:
    """The input columns of a table; output columns are not read."""
    rows = record.get("rows", default=record.outputs[name])
    return [{column: row[column] for column in columns if column in row} for row in rows]


def _brier_rows(record: GoldenRecord, name: str) -> list[dict[str, Any]]:
    return [
        {
            **row,
            "reward": brier_reward(row["acc"], row["conf"], format_ok=row.get("format_ok", True)),
        }
        for row in _select_input_columns(record, name, "acc", "conf", "format_ok")
    ]


BRIER = RecordFamily(
    frozenset({"g19"}),
    lambda r: "1-(acc-c)^2" in r.searchable_text.replace(" ", ""),
    {"rows": _brier_rows},
)


def _compute_rlcr_reward(correct: float, confidence: float) -> float:
    """acc - (acc - c)²."""
    return correct + brier_reward(correct, confidence) - 1.0


def _rlcr_rows(record: GoldenRecord, name: str) -> list[dict[str, Any]]:
    rows = _select_input_columns(record, name, "acc", "conf")
    return [{**row, "rlcr": _compute_rlcr_reward(row["acc"], row["conf"])} for row in rows]


def _compute_expected_rlcr(name: str, confidence: float) -> float:
    """At the accuracy that ends the name: p07 is 0.7, p075 is 0.75."""
    digits = name.rpartition("_p")[2]
    p = float(f"{digits[0]}.{digits[1:]}")
    return p * _compute_rlcr_reward(1.0, confidence) + (1 - p) * _compute_rlcr_reward(
        0.0, confidence
    )


def _find_best_confidence(record: GoldenRecord, name: str) -> float:
    return max((k / 1000 for k in range(1001)), key=lambda c: _compute_expected_rlcr(name, c))


def _expected_rewards(record: GoldenRecord, name: str) -> list[float]:
    grid = record.get("conf_grid", "confs", "conf", "grid", default=[0.5, 0.6, 0.7, 0.8, 1.0])
    return [_compute_expected_rlcr(name, c) for c in grid]


RLCR = RecordFamily(
    frozenset({"g20"}),
    lambda r: "rlcr" in r.title.lower(),
    {
        "rows": _rlcr_rows,
        r"best_conf.*_p\d+": _find_best_confidence,
        r"expected_reward.*_p\d+": _expected_rewards,
    },
)


# Advantages among siblings ----------------------------------------------------------------------

_REWARDS = (
    "conf_reward",
    "conf_rewards",
    "confidence_rewards",
    "confidence_reward",
    "brier",
    "brier_rewards",
    "rewards",
    "reward",
    "scores",
)


def _get_sibling_rewards(record: GoldenRecord, name: str) -> list[list[float]]:
    """Rewards `[G_a][G_c]`, given directly or by confidences; an output may name its own."""
    own = record.inputs.get(name)
    rewards = own if isinstance(own, list) else None
    if rewards is None and record.has(*_REWARDS):
        rewards = record.get(*_REWARDS)
    if rewards is None:
        stated = record.get("conf", "confs", "confidence", "confidences")
        correct = record.get("acc", "acc_reward", "correct", "accuracy")
        nested = stated if isinstance(stated[0], list) else [stated]
        labels = correct if isinstance(correct, list) else [correct] * len(nested)
        pairs = zip(labels, nested, strict=True)
        rewards = [[brier_reward(y, c) for c in siblings] for y, siblings in pairs]
    if isinstance(rewards, int | float):
        rewards = [rewards]
    return rewards if isinstance(rewards[0], list) else [rewards]


def _nest_like_inputs(
    record: GoldenRecord, name: str, values: Tensor, rewards: list[list[float]]
) -> Any:
    """Shapes the result like the inputs: nested, or a single list."""
    nested = [part.tolist() for part in values.split([len(siblings) for siblings in rewards])]
    own = record.inputs.get(name)
    for key in ("", *_REWARDS, "conf", "confs", "confidence", "confidences"):
        source = own if key == "" else record.inputs.get(key)
        if isinstance(source, list) and source:
            return nested if isinstance(source[0], list) else nested[0]
    return nested


def _first_level(record: GoldenRecord, rewards: list[list[float]], normalize: Any) -> Tensor:
    flat = torch.tensor([r for siblings in rewards for r in siblings], dtype=torch.float64)
    answers = [i for i, siblings in enumerate(rewards) for _ in siblings]
    return group_advantages(
        flat,
        torch.tensor(answers),
        normalize=normalize,
        ddof=record.get("ddof", default=0),
        eps=record.get("eps", default=1e-4),
        singleton="zero",
    )


def _second_level(record: GoldenRecord, name: str) -> Any:
    """Prompt scale and EMA scale on centred advantages, renormalisation on divided ones."""
    rewards = _get_sibling_rewards(record, name)
    how = {"ddof": record.get("ddof", default=0), "eps": record.get("eps", default=1e-4)}
    divides = re.search("std|sigma|renorm", name) and "ema" not in name and "scale" not in name
    advantages = _first_level(record, rewards, "std" if divides else "center")
    prompt = torch.zeros(len(advantages), dtype=torch.int64)
    if "prompt_scale" in name:
        advantages = prompt_scale(advantages, prompt, **how)
    elif "renorm" in name:
        advantages = group_advantages(advantages, prompt, **how)
    elif "ema" in name:
        advantages, mean_square = ema_scale(
            advantages, _mean_square(record), momentum=_get_ema_momentum(record), eps=how["eps"]
        )
        if re.search("state|new|updated|_v$", name):
            return mean_square
    return _nest_like_inputs(record, name, advantages, rewards)


_DEVIATIONS = ("ema_sigma", "ema_std", "sigma_ema", "ema_rms", "ema_scale", "ema")
_SQUARES = ("ema_mean_square", "mean_square", "ema_var", "ema_v", "v")
_MOMENTA = ("momentum", "ema_momentum", "ema_decay", "decay")


def _mean_square(record: GoldenRecord) -> float | None:
    if record.has(*_DEVIATIONS):
        return float(record.get(*_DEVIATIONS)) ** 2
    return float(record.get(*_SQUARES)) if record.has(*_SQUARES) else None


def _get_ema_momentum(record: GoldenRecord) -> float:
    """The momentum; a deviation given without one is used as the divisor itself."""
    fixed = 1.0 if _mean_square(record) is not None else 0.9
    return float(record.get(*_MOMENTA, default=fixed))


SECOND_LEVEL = RecordFamily(
    frozenset({"g22"}),
    lambda r: "level" in r.searchable_text and "conf" in r.searchable_text,
    {
        ".*(prompt_scale|renorm|ema|center|centre|within|std|none|first|second|level).*": (
            _second_level
        )
    },
)


def _compute_sibling_output(record: GoldenRecord, name: str) -> Any:
    """Advantages of identical confidences, or of a single one."""
    if re.search("g_?c_?(eq_?)?1|single|singleton|one|alone", name):
        own = record.inputs.get(name)
        one = [[own if isinstance(own, int | float) else _get_sibling_rewards(record, name)[0][0]]]
        advantage = _first_level(record, one, "std")
        return (
            advantage[0].item()
            if isinstance(record.outputs[name], int | float)
            else [advantage[0].item()]
        )
    rewards = _get_sibling_rewards(record, name)
    normalize = "center" if re.search("cent(er|re)", name) else "std"
    return _nest_like_inputs(record, name, _first_level(record, rewards, normalize), rewards)


SIBLINGS = RecordFamily(
    frozenset({"g23"}),
    lambda r: "identical" in r.searchable_text or "g_c=1" in r.searchable_text.replace(" ", ""),
    {".*": _compute_sibling_output},
)


# Effect of the division --------------------------------------------------------------------------


def _compute_expected_push(record: GoldenRecord, centre: float, normalize: Any) -> float:
    """Expected upward push on two siblings at c0 ± spread, with answers right at rate p."""
    p, spread = record.get("p"), record.get("spread")
    total = 0.0
    for correct, share in ((1.0, p), (0.0, 1 - p)):
        rewards = [[brier_reward(correct, centre + sign * spread) for sign in (1, -1)]]
        up, down = _first_level(record, rewards, normalize).tolist()
        total += share * (up - down) / 2
    return total


def _compute_field_rows(record: GoldenRecord, name: str) -> list[dict[str, float]]:
    return [
        {
            **row,
            "center_only": _compute_expected_push(record, row["c0"], "center"),
            "within_answer_std": _compute_expected_push(record, row["c0"], "std"),
        }
        for row in _select_input_columns(record, name, "c0")
    ]


FIELD = RecordFamily(
    frozenset({"g24"}), lambda r: r.has("p") and r.has("spread"), {"rows": _compute_field_rows}
)


def _project_advantages(record: GoldenRecord, name: str) -> list[float]:
    kind = name.removeprefix("tokens_")
    if not record.has(f"A_{kind}"):
        raise MissingInputError(f"no A_{kind} among its inputs")
    weight = record.get(f"lambda_{kind}", default=1.0)
    mask = record.tokens(f"M_{kind}", f"mask_{kind}").bool()
    per_row = weight * torch.atleast_1d(record.tensor(f"A_{kind}"))
    return spread_over_mask(per_row, mask)[0].tolist()


PROJECTION = RecordFamily(
    frozenset({"g25"}), lambda r: r.has("A_ans", "A_conf"), {"tokens_[a-z]+": _project_advantages}
)
