"""The rollouts page: prompts of a step with trees of answers and their continuations."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlx_registry import (
    NotFoundError,
    Registry,
    RolloutIndex,
    RolloutQuery,
    RunRecord,
    get_model_text,
    search_body_trees,
)
from rlx_web.pages.bodies import (
    Trees,
    build_reward_cells,
    find_player,
    list_messages_between,
    load_tree_records,
    read_step_body,
)
from rlx_web.pages.runs import build_run_summary

SCREEN = 4
"""Prompts per page."""


def build_rollouts_page(
    registry: Registry, ref: str, step: int, query: RolloutQuery, page: int
) -> dict[str, Any]:
    """One page, counted from 1, of the trees of a step that match a query."""
    record = registry.run(ref)
    steps = registry.results.rollout_steps(record.id)
    if step not in steps:
        raise NotFoundError(f"{record.id} has no rollouts of step {step}")
    at = steps.index(step)
    wanted, unread = registry.queries.matching_trees(record.id, step, query), None
    if query.text is not None:  # which may be in a preview, or anywhere in the messages
        others = registry.queries.matching_trees(record.id, step, replace(query, text=None))
        containing, unread = read_step_body(registry, record, step, search_body_trees, query.text)
        wanted = sorted({*wanted, *((containing or set()) & set(others))})
    pages = max(1, math.ceil(len(wanted) / SCREEN))
    page = min(page, pages)
    largest = registry.queries.largest_advantages(record.id, step)
    shown = wanted[(page - 1) * SCREEN : page * SCREEN]
    index = registry.results.rollout_index(record.id, step, shown)
    bodies, missing = load_tree_records(registry, record, step, shown) if shown else ({}, None)
    trees = [
        _build_rollout_tree(record, tree, [r for r in index if r.tree == tree], bodies)
        for tree in shown
    ]
    with_problem = (
        registry.queries.problem_steps(record.id, query.problem) if query.problem else None
    )
    return {
        "run": build_run_summary(record),
        "step": step,
        "steps": {"first": steps[0], "last": steps[-1], "count": len(steps)},
        "previous": steps[at - 1] if at else None,
        "next": steps[at + 1] if at + 1 < len(steps) else None,
        "query": asdict(query),
        "page": page,
        "pages": pages,
        "matching": len(wanted),
        "largest": largest,
        "problem_steps": with_problem,
        "reward_range": find_reward_range(row for tree in trees for row in tree["rows"]),
        "statistics": registry.results.rollout_body(record.id, step).statistics,
        "turns": sorted(largest),
        "trees": trees,
        "missing": missing or unread,
    }


def find_reward_range(rows: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """The most negative and the most positive weighted rewards of rows and those below; 0 inside.
    The bars of all rows have this range, so that the length of each part is its reward."""
    low = high = 0.0
    for row in rows:
        parts = [e["part"] for e in row["entries"] if e["counts"] and e["part"] is not None]
        parts = parts if row["entries"] else [row["reward"] or 0.0]
        finite = [part for part in parts if math.isfinite(part)]
        below = find_reward_range(row["below"])
        low = min(low, below[0], sum(part for part in finite if part < 0))
        high = max(high, below[1], sum(part for part in finite if part > 0))
    return low, high


def nearest_step(registry: Registry, ref: str, step: int) -> int:
    record = registry.run(ref)
    steps = registry.results.rollout_steps(record.id)
    if not steps:
        raise NotFoundError(f"{record.id} has no recorded rollouts")
    return min(steps, key=lambda s: (abs(s - step), s))


def _build_rollout_tree(
    record: RunRecord, number: int, rows: Sequence[RolloutIndex], bodies: Trees
) -> dict[str, Any]:
    """A prompt with its rows as a tree; rows whose parent is missing become roots."""
    body = bodies.get(number)
    segments = {} if body is None else {row["row"]: row for row in body["rows"]}
    nodes = {}
    for row in rows:
        messages, entries = [], []
        if body is not None and (kept := segments.get(row.row)) is not None:
            messages = list_messages_between(body, kept["parent"], kept["segment"])
            entries = [e for m in messages if m["author"] == "policy" for e in m["rewards"]]
            entries += build_reward_cells(body["segments"][kept["segment"]]["global_rewards"])
        nodes[row.row] = asdict(row) | {"said": messages, "entries": entries, "below": []}
    top = []
    for row in rows:
        parent = row.parent_row
        if parent is not None and parent != row.row and parent < row.row and parent in nodes:
            nodes[parent]["below"].append(nodes[row.row])
        else:
            top.append(nodes[row.row])
    return {
        "tree": number,
        "problem_id": rows[0].problem_id if rows else "",
        "prompt": None if body is None else get_model_text(body, 0),
        "stratum": None if body is None else body["stratum"],
        "role": None if body is None else body["role"],
        "player": None if body is None else find_player(record, body),
        "groups": _group_tree_rows(rows),
        "rows": top,
    }


def _group_tree_rows(rows: Sequence[RolloutIndex]) -> list[dict[str, Any]]:
    """The rewards of every group, and whether it has a nonzero advantage."""
    groups: dict[int, list[RolloutIndex]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return [
        {
            "group": group,
            "turn": some[0].turn,
            "rows": [row.row for row in some],
            "rewards": [row.reward for row in some],
            "signal": any(row.advantage for row in some),
        }
        for group, some in groups.items()
    ]
