"""The credit page, which explains a rollout's advantage by its group, rewards and tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from rlx_registry import (
    STREAMS,
    NotFoundError,
    Registry,
    RolloutIndex,
    RowRecord,
    RunRecord,
    TreeRecord,
    get_model_text,
    get_token_values,
    list_path_segments,
)
from rlx_web.pages.bodies import (
    build_reward_cells,
    find_player,
    list_messages_between,
    load_tree_records,
)
from rlx_web.pages.runs import build_run_summary
from rlx_web.text import list_leaf_values

CHANNELS = {
    "advantage": "advantages",
    **{s.title: s.stored_name for s in STREAMS.values() if s.title and s.shape != "[B]"},
    "log-probability, sampler": "behaviour",
    "learner − sampler": "drift",
}
"""Fields by which tokens can be coloured, keyed by their titles."""
WINDOW = 600
"""Tokens per page."""
CONTEXT = 40
"""Tokens shown before the row's own."""


def build_credit_page(
    registry: Registry, ref: str, step: int, row: int, tokens: tuple[int, int] | None
) -> dict[str, Any]:
    """The data of one row of a step, token by token: of a half-open range of positions in the row's
    whole sequence, which by default begins shortly before the row's own tokens."""
    record = registry.run(ref)
    if step not in registry.results.rollout_steps(record.id):
        raise NotFoundError(f"{record.id} has no rollouts of step {step}")
    found = registry.results.rollout_index(record.id, step)
    tree = next((one.tree for one in found if one.row == row), None)
    if tree is None:
        raise NotFoundError(f"step {step} of {record.id} has no row {row}")
    index = {one.row: one for one in found if one.tree == tree}
    own = index[row]
    bodies, missing = load_tree_records(registry, record, step, [tree])
    body = bodies.get(tree)
    kept = None if body is None else next((r for r in body["rows"] if r["row"] == row), None)
    if body is None or kept is None:
        raise NotFoundError(
            missing or f"the body of step {step} of {record.id} does not have row {row}"
        )
    lines = _build_token_lines(body, kept)
    if tokens is None:
        start = max(0, kept["start"] - CONTEXT)
        stop = min(len(lines), start + WINDOW)
    else:
        start = max(0, min(tokens[0], len(lines)))
        stop = max(start, min(tokens[1], len(lines), start + WINDOW))
    rows = sorted(index)
    at = rows.index(row)
    statistics = registry.results.rollout_body(record.id, step).statistics
    phase = statistics.get("phase")
    rules = _collect_step_rules(record, phase)
    credit = rules.get("credit", {})
    return {
        "run": build_run_summary(record),
        "step": step,
        "row": asdict(own),
        "level": kept["level"],
        "player": find_player(record, body),
        "problem": {k: body[k] for k in ("problem_id", "stratum", "role")},
        "prompt": get_model_text(body, 0),
        "previous": rows[at - 1] if at else None,
        "next": rows[at + 1] if at + 1 < len(rows) else None,
        "group": _build_comparison_group(own, [i for i in index.values() if i.group == own.group]),
        "turns": [
            {key: said[key] for key in ("turn", "kind", "tokens", "finish_reason", "rewards")}
            for said in list_messages_between(body, kept["parent"], kept["segment"])
            if said["author"] == "policy"
        ],
        "global_rewards": build_reward_cells(body["segments"][kept["segment"]]["global_rewards"]),
        "scores": kept["scores"],
        "recipe": rules,
        "phase": phase,
        "beta": statistics.get("beta") if credit.get("use_kl_in_reward") else None,
        "channels": [  # each with its largest finite absolute value
            {"name": name, "title": title, "largest": max(filter(isfinite, values), default=0.0)}
            for title, name in CHANNELS.items()
            if (values := [abs(line[name]) for line in lines if line.get(name) is not None])
        ],
        "tokens": {"start": start, "stop": stop, "total": len(lines), "own": kept["start"]},
        "lines": lines[start:stop],
        "textless": "pieces" not in body,
    }


def _build_token_lines(body: TreeRecord, kept: RowRecord) -> list[dict[str, Any]]:
    """All tokens of the row's sequence, including its prompt."""
    pieces = body.get("pieces")
    streams = {name: get_token_values(kept, name) for name in CHANNELS.values()}
    first, held = kept["start"], len(get_token_values(kept, "mask") or ())
    lines: list[dict[str, Any]] = []
    for s in list_path_segments(body, kept["segment"]):
        segment = body["segments"][s]
        texts = pieces[s] if pieces else [f"#{token}" for token in segment["token_ids"]]
        sampled = segment["behaviour_logprobs"] or ()
        for i, token in enumerate(segment["token_ids"]):
            at = len(lines)
            line: dict[str, Any] = {
                "position": at,
                "text": texts[i],
                "token": token,
                "author": segment["author"],
                "turn": segment["turn"],
                "kind": segment["kind"],
                "learns": False,
            }
            if i < len(sampled):
                line["behaviour"] = sampled[i]
            if first <= at < first + held:
                line |= {name: values[at - first] for name, values in streams.items() if values}
                line["learns"] = bool((get_token_values(kept, "mask") or ())[at - first])
            old, behaviour = line.get("old_logprobs"), line.get("behaviour")
            if old is not None and behaviour is not None and line["learns"]:
                line["drift"] = old - behaviour
            lines.append(line)
    return lines


def _build_comparison_group(own: RolloutIndex, mates: Sequence[RolloutIndex]) -> dict[str, Any]:
    """The rows it was compared with, including itself, and the group's mean and deviation."""
    rewards = [mate.reward for mate in mates if mate.reward is not None]
    mean = fmean(rewards) if rewards else None
    known = own.reward is not None and mean is not None
    return {
        "id": own.group,
        "rows": [
            {k: getattr(mate, k) for k in ("row", "reward", "advantage", "preview", "failed")}
            for mate in mates
        ],
        "mean": mean,
        "sigma": stdev(rewards) if len(rewards) > 1 else None,
        "above": own.reward - mean if known else None,  # type: ignore[operator]
        "alike": len(set(rewards)) <= 1,
    }


def _collect_step_rules(record: RunRecord, phase: object) -> dict[str, Any]:
    """All estimator, mask and credit options of the step's phase, including defaults."""
    phases = record.spec.get("phases") or []
    changes = next((p.get("set") or {} for p in phases if p.get("name") == phase), {})
    found: dict[str, Any] = {}
    for section in ("estimator", "mask", "credit"):
        if isinstance(settings := record.settings.get(section), Mapping):
            values = dict(list_leaf_values(settings))
            for path, value in changes.items():
                if path.startswith(f"{section}."):
                    values[path.removeprefix(f"{section}.")] = value
            found[section] = {path: value for path, value in values.items() if path}
    return found
