"""Exports rollouts as JSON Lines, with the field names of KG-R1 (arXiv 2509.26383)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.cli.output import format_json
from rlx.reward import RewardEntry
from rlx.rollout import RolloutTree, Segment

if TYPE_CHECKING:
    from rlx.record import StoredStep  # brings torch

__all__ = ["json_lines"]

NO_TURN = -1


def json_lines(
    stored: "StoredStep", rows: Sequence[int], about: Mapping[str, Any]
) -> Iterator[str]:
    """Yields one JSON object per trained row, in printable ASCII.

    P tokens precede the row's first own token and R follow; nothing is padded. The lists are
    `prompt_ids` [P]; `response_ids`, `turn_sequence`, `loss_mask`, `effective_mask` and
    `advantages` [R]; `attention_mask` and `info_mask` [P + R]. `turn_sequence` is the turn number
    on policy tokens and -1 on others. `loss_mask` is 1 on policy tokens, `effective_mask` 1 on
    tokens that enter the loss.

    `turn_reward_components` sum to `turn_rewards`, and `global_rewards` sum to their part of the
    total score. Names that begin with `_` are never summed; `_raw_NAME` is NAME without its weight.
    An absent reward is null. A turn without rewards is not in `turn_rewards`.

    Args:
        stored: the stored rollouts of one step.
        rows: row numbers to write, in order.
        about: fields that every object begins with.

    Reference:
        KG-R1, arXiv 2509.26383.
    """
    for number in rows:
        yield format_json({**about, **_build_row_json(stored, number)})


def _build_row_json(stored: "StoredStep", number: int) -> dict[str, Any]:
    at, segment, parent, kind, _ = stored.rows.places[number]
    tree, places = stored.trees[at], [place[:2] for place in stored.rows.places]
    own, _ = tree.own_turns(segment)
    path = tree.path(segment)
    first = path.index(own[0])
    return {
        "row": number,
        "parent_row": places.index((at, parent)) if (at, parent) in places else None,
        "tree": at,
        "group": int(stored.rows.groups[number]),
        "kind": kind,
        "problem_id": tree.problem.id,
        "problem": dict(tree.problem.fields),
        "prompt": _join_prompt([tree.segments[index] for index in path[:first]]),
        "turns": [_build_turn_json(tree, turn) for turn in own],
        "structured_rewards": _build_rewards_json(stored, at, own),
        "scores": stored.rows.get_row_scores(number),
        **_build_tokens_json(stored, number, path[:first], path[first:], own),
    }


def _join_prompt(before: Sequence[Segment]) -> str:
    """The last prompt before a turn, and what an environment added to it (self-play)."""
    text = ""
    for segment in before:
        text = segment.text if segment.author != "environment" else text + segment.text
    return text


def _build_turn_json(tree: RolloutTree, index: int) -> dict[str, Any]:
    """Returns a turn and the observation that followed it; null where there is none."""
    turn = tree.segments[index]
    after = [s.text for s in tree.segments if s.parent == index and s.author == "environment"]
    return {
        "turn": turn.turn,
        "kind": turn.kind,
        "response": turn.text,
        "observation": after[0] if after else None,
        "info": dict(turn.info),
        "finish_reason": turn.finish_reason,
    }


def _build_rewards_json(stored: "StoredStep", tree: int, own: Sequence[int]) -> dict[str, Any]:
    table, segments = stored.rewards, stored.trees[tree].segments
    turns = {str(segments[s].turn): s for s in own}
    totals = {turn: table.get_turn_total((tree, s)) for turn, s in turns.items()}
    return {
        "turn_rewards": {turn: total for turn, total in totals.items() if total is not None},
        "turn_reward_components": {
            turn: _collect_reward_values(table.turns.get((tree, s), {}))
            for turn, s in turns.items()
        },
        "global_rewards": _collect_reward_values(table.rollouts.get((tree, own[-1]), {})),
    }


def _collect_reward_values(entries: Mapping[str, RewardEntry]) -> dict[str, float | None]:
    """Returns weighted values, then the raw values of the rewards that are summed."""
    weighted = {
        e.name: e.raw if e.raw is None or not e.is_summed else e.weight * e.raw
        for e in entries.values()
    }
    return weighted | {f"_raw_{e.name}": e.raw for e in entries.values() if e.is_summed}


def _build_tokens_json(
    stored: "StoredStep",
    number: int,
    before: Sequence[int],
    after: Sequence[int],
    own: Sequence[int],
) -> dict[str, Any]:
    """Returns the per-token lists; `before` is the path of the prompt, `after` of the response."""
    segments = stored.trees[stored.rows.places[number][0]].segments
    prompt = [token for s in before for token in segments[s].token_ids]
    response = [token for s in after for token in segments[s].token_ids]
    turn_of = {s: segments[s].turn if s in own else NO_TURN for s in after}
    turns = [turn_of[s] for s in after for _ in segments[s].token_ids]
    policy = [int(turn != NO_TURN) for turn in turns]
    here = slice(len(prompt), len(prompt) + len(response))
    mask, advantages = (stored.rows.tokens[name] for name in ("mask", "advantages"))
    return {
        "prompt_ids": prompt,
        "response_ids": response,
        "turn_sequence": turns,
        "attention_mask": [1] * (len(prompt) + len(response)),
        "info_mask": [1] * len(prompt) + policy,
        "loss_mask": policy,
        "effective_mask": None if mask is None else mask[number, here].int().tolist(),
        "advantages": None if advantages is None else advantages[number, here].tolist(),
    }
