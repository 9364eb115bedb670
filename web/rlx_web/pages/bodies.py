"""Reads rollout trees, messages and rewards from a step's rollout file."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlx_registry import (
    BodyError,
    Registry,
    RewardRecord,
    RunRecord,
    TreeRecord,
    get_model_text,
    list_path_segments,
    read_trees,
)

A = TypeVar("A")
T = TypeVar("T")
Trees = Mapping[int, TreeRecord]
"""Records of a rollout file by tree."""


def read_step_body(
    registry: Registry, record: RunRecord, step: int, read: Callable[[Path, str, A], T], argument: A
) -> tuple[T | None, str | None]:
    """What `read` finds in a step's rollout file; or None, and the reason, if that cannot be
    read."""
    body = registry.results.rollout_body(record.id, step)
    if record.directory is None:
        return None, f"{record.id} has no folder"
    try:
        return read(Path(record.directory) / body.path, body.sha256, argument), None
    except BodyError as error:
        return None, str(error)


def load_tree_records(
    registry: Registry, record: RunRecord, step: int, trees: Collection[int]
) -> tuple[Trees, str | None]:
    """The records of some trees; or none, and the reason."""
    found, why = read_step_body(registry, record, step, read_trees, trees)
    return {tree["tree"]: tree for tree in found or ()}, why


def find_player(record: RunRecord, tree: TreeRecord) -> int | None:
    """The player that the policy is in a tree of self-play, 0 or 1; None if it is not said."""
    rollout, phases = record.spec.get("rollout") or {}, record.spec.get("phases") or ()
    changed = any((phase.get("set") or {}).get("rollout.self_play") for phase in phases)
    if not (changed or rollout.get("self_play")):
        return None
    player = json.loads(tree["problem"]).get("player")
    return player if player in (0, 1) else None


def list_messages_between(tree: TreeRecord, parent: int, segment: int) -> list[dict[str, Any]]:
    """The messages after `parent` up to `segment`: turns, observations and follow-up prompts, as
    the model read them, with what the chat template adds. A turn that continues the message of the
    one before has no prompt of its own."""
    path = list_path_segments(tree, segment)
    after = path.index(parent) + 1 if parent in path else 1
    return [
        {
            "segment": s,
            "author": one["author"],
            "kind": one["kind"],
            "turn": one["turn"],
            "text": one["text"] if one["author"] == "policy" else get_model_text(tree, s),
            "finish_reason": one["finish_reason"],
            "tokens": len(one["token_ids"]),
            "rewards": build_reward_cells(one["rewards"]),
        }
        for s in path[after:]
        for one in [tree["segments"][s]]
        if one["author"] != "prompt" or one["token_ids"]
    ]


def build_reward_cells(entries: Collection[RewardRecord] | None) -> list[dict[str, Any]]:
    """Raw rewards and their weighted parts; None if a reward is absent."""
    return [
        {
            "name": e["name"],
            "raw": e["raw"],
            "weight": e["weight"],
            "counts": not e["name"].startswith("_"),
            "part": None if e["raw"] is None else e["raw"] * e["weight"],
            "status": e["status"],
            "reason": e["reason"],
            "parts": json.loads(e["parts"] or "{}"),
        }
        for e in entries or ()
    ]
