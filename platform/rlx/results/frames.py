"""Pandas frames of what a run has recorded."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pandas as pd

from rlx_registry import EvaluationRecord, RolloutIndex

if TYPE_CHECKING:
    from rlx.plan import RowAccount


def build_metric_frame(metrics: Mapping[str, Sequence[tuple[int, float]]]) -> pd.DataFrame:
    """One row per step, one column per metric; NaN where a step lacks it."""
    series = {name: pd.Series(dict(points), dtype=float) for name, points in metrics.items()}
    return pd.DataFrame(series).sort_index().rename_axis("step")


def build_evaluation_frame(evaluations: Iterable[EvaluationRecord]) -> pd.DataFrame:
    """One row per evaluation: `step`, `label`, `suite`, and its metrics that are numbers."""
    return pd.DataFrame(
        {
            "step": one.step,
            "label": one.label,
            "suite": one.suite,
            **{k: v for k, v in one.metrics.items() if isinstance(v, int | float)},
        }
        for one in evaluations
    )


def build_answer_frame(payload: Mapping[str, Any]) -> pd.DataFrame:
    """One row per answer: `problem_ids`, `strata`, `correct`, `confidence` (NaN if unreadable)."""
    names = ("problem_ids", "strata", "correct", "confidence")
    there = {name: payload[name] for name in names if payload.get(name) is not None}
    return pd.DataFrame(there).astype({"confidence": float} if "confidence" in there else {})


def build_rollout_frame(steps: Mapping[int, Sequence[RolloutIndex]]) -> pd.DataFrame:
    """One row per trained row: `step` and the fields of `RolloutIndex`.

    Raw rewards are `rewards/NAME`, values of the whole row `scores/NAME`; NaN where absent.
    """
    return pd.DataFrame(
        {"step": step, **_spread_fields(asdict(row), "rewards", "scores")}
        for step, rows in steps.items()
        for row in rows
    )


def build_score_frame(lines: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One row per scored line; the parts of its score are `parts/NAME`."""
    return pd.DataFrame(_spread_fields(line, "parts") for line in lines)


def build_token_frame(rows: "Iterable[tuple[Mapping[str, Any], RowAccount]]") -> pd.DataFrame:
    """One row per token: the fields of its row, then those of `rlx.plan.row_accounts.TokenLine`.

    A reward that is placed on the token is `placed/NAME`; 0 where another token has it.

    Args:
        rows: of each account, the columns that come first, and the account.
    """
    frame = pd.DataFrame(
        {
            **first,
            **{name: getattr(row, name) for name in ("row", "tree", "group", "kind")},
            **_spread_fields(asdict(token), "placed"),
        }
        for first, row in rows
        for token in row.tokens
    )
    placed = [name for name in frame.columns if name.startswith("placed/")]
    return frame.fillna(dict.fromkeys(placed, 0.0))


def _spread_fields(record: dict[str, Any], *names: str) -> dict[str, Any]:
    """Replaces mappings of a record by their values, as `field/key`."""
    for name in names:
        record |= {f"{name}/{key}": value for key, value in record.pop(name).items()}
    return record
