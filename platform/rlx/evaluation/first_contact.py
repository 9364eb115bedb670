"""First contact: what a model answers before it is trained, and whether that can teach it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rlx.batch import build_token_batch, list_batch_rows
from rlx.credit import compute_group_extremes, has_score_spread, structured_scores
from rlx.phase_setup import PhaseSetup
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import RolloutTree, Segment
from rlx.step import find_lost_rows, join_row_rewards
from rlx.text import escape_unprintable, pluralize_noun

SAMPLES = 3
"""Turns that are shown in full."""
REASONS = 2
"""Reasons that are named of a reward."""
FEW = 0.5
"""A share of turns below which a form counts as unknown to the model."""


@dataclass(frozen=True, slots=True)
class TurnContact:
    """The turns of one kind: the share cut off at `max_new_tokens`, and that which holds each
    span."""

    turns: int
    truncated: float
    spans: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RewardContact:
    """What one reward gave: figures of its scores, None without any; the share of turns or rollouts
    without one; and its commonest reasons, with how often each was given."""

    mean: float | None
    lowest: float | None
    highest: float | None
    absent: float
    reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GroupContact:
    """The groups of one kind of turn whose tokens learn. `with_signal` of them have scores that
    differ; where the estimator does not compare siblings, all or none. All if there is a teacher.
    """

    groups: int
    with_signal: int


@dataclass(frozen=True, slots=True)
class ContactSample:
    """A turn in full: what the model read before it, what it wrote, and its rewards with their
    reasons."""

    kind: str
    read: str
    wrote: str
    rewards: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstContact:
    """What a model's answers to a few training problems say about the run that is to come: by kind
    of turn, by reward; and `advice`, what to change, most important first."""

    prompts: int
    turns: Mapping[str, TurnContact]
    rewards: Mapping[str, RewardContact]
    groups: Mapping[str, GroupContact]
    samples: Sequence[ContactSample]
    advice: Sequence[str]

    @property
    def has_signal(self) -> bool:
        return any(group.with_signal for group in self.groups.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "has_signal": self.has_signal}

    def summarize(self) -> str:
        """One line: spans, rewards and groups."""
        return "; ".join(self._describe_shares(reasons=0))

    def list_lines(self) -> list[str]:
        """Lines for a terminal or a log; what a model wrote is escaped."""
        lines = [f"first contact: {self.prompts} problems"]
        lines += [f"  {line}" for line in self._describe_shares(reasons=REASONS)]
        for number, sample in enumerate(self.samples, 1):
            lines += [f"  sample {number}, {sample.kind}:", "    reads"]
            lines += [f"      | {line}" for line in sample.read.splitlines()]
            lines += ["    writes", *(f"      | {line}" for line in sample.wrote.splitlines())]
            lines += [f"    {name} {said}" for name, said in sample.rewards.items()]
        lines += [f"  to change: {line}" for line in self.advice]
        return [escape_unprintable(line) for line in lines]

    def _describe_shares(self, reasons: int) -> Iterator[str]:
        for kind, turn in self.turns.items():
            held = [f"{v:.0%} hold `{name}`" for name, v in turn.spans.items()]
            cut = [f"{turn.truncated:.0%} are cut off"] if turn.truncated else []
            yield f"{turn.turns} {pluralize_noun(kind)}: " + (", ".join([*held, *cut]) or "whole")
        for name, reward in self.rewards.items():
            score = "no score" if reward.mean is None else f"mean {reward.mean:.3f}"
            absent = [f"{reward.absent:.0%} without a score"] if reward.absent else []
            common = [f"{n}× {text}" for text, n in list(reward.reasons.items())[:reasons]]
            yield f"{name}: " + ", ".join([score, *absent, *common])
        for kind, group in self.groups.items():
            yield f"{group.with_signal} of {group.groups} {kind} groups have a signal"


def describe_first_contact(
    setup: PhaseSetup,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    decode: Callable[[Sequence[int]], str],
) -> FirstContact:
    """Describes a model's rollouts of a phase; `decode` shows control tokens too."""
    turns = _describe_kinds(setup, trees)
    rewards = _describe_rewards(table)
    groups = _count_groups(setup, trees, table)
    return FirstContact(
        prompts=len(trees) // setup.plan.trees_per_prompt,
        turns=turns,
        rewards=rewards,
        groups=groups,
        samples=_draw_samples(trees, table, decode),
        advice=list(_advise(setup, turns, rewards, groups)),
    )


def _describe_kinds(setup: PhaseSetup, trees: Sequence[RolloutTree]) -> dict[str, TurnContact]:
    by_kind: dict[str, list[Segment]] = {}
    for tree in trees:
        for s in tree.policy_segments:
            by_kind.setdefault(tree.segments[s].kind, []).append(tree.segments[s])
    turns, requested = setup.spec.rollout.turn_specs, setup.requested_kinds
    found = {}
    for kind, those in by_kind.items():
        truncated = sum(s.finish_reason == "length" for s in those) / len(those)
        wanted = turns[requested[kind]].spans if kind in requested else ()
        spans = {name: sum(name in s.spans for s in those) / len(those) for name in wanted}
        found[kind] = TurnContact(len(those), truncated, spans)
    return found


def _describe_rewards(table: RewardTable) -> dict[str, RewardContact]:
    entries: dict[str, list[RewardEntry]] = {}
    for places in (table.turns, table.rollouts):
        for named in places.values():
            for entry in named.values():
                entries.setdefault(entry.name, []).append(entry)
    found = {}
    for name, those in sorted(entries.items()):
        scores = [entry.raw for entry in those if entry.raw is not None]
        reasons = Counter(entry.reason for entry in those if entry.reason)
        found[name] = RewardContact(
            sum(scores) / len(scores) if scores else None,
            min(scores, default=None),
            max(scores, default=None),
            1 - len(scores) / len(those),
            dict(reasons.most_common(REASONS)),
        )
    return found


def _count_groups(
    setup: PhaseSetup, trees: Sequence[RolloutTree], table: RewardTable
) -> dict[str, GroupContact]:
    """Groups of rows that learn, by the requested kind of their last turn; rows below a fork of an
    agent's history are of the kind of those above."""
    kinds = list(setup.spec.rollout.turns)
    spec = setup.spec
    without = find_lost_rows(trees, table, needs_reward=spec.learns_from_rewards)
    if len(without) == len(list_batch_rows(trees)):
        return {kind: GroupContact(0, 0) for kind in kinds}
    batch = build_token_batch(trees, without=without)
    rewards = join_row_rewards(batch, trees, table, batch.is_own).rewards
    scores = structured_scores(rewards.turn_rewards, rewards.turn_present, rewards.global_rewards)
    mask, expected = setup.mask(batch), spec.loss.expected
    learns = mask.any(dim=1)
    found = {}
    levels = batch.levels.clamp(max=len(kinds) - 1)
    for level in levels[learns].unique().tolist():
        rows = learns & (levels == level)
        groups, slot = batch.group_ids[rows].unique(return_inverse=True)
        if not (setup.compares(kinds[level]) or (setup.ranks_rows and len(groups) < len(slot))):
            slot = torch.zeros_like(slot)
        highest, lowest = compute_group_extremes(scores[rows], slot, int(slot.max()) + 1)
        spread = has_score_spread(highest, lowest)[slot]
        with_signal = batch.group_ids[rows][spread].unique()
        found[kinds[level]] = GroupContact(len(groups), len(with_signal))
        content = None if expected is None else batch.contents.get(expected.span)
        is_stated = content is not None and bool((content & mask)[rows].any())
        if is_stated or spec.learns_from_teacher:  # which needs no others to compare
            found[kinds[level]] = GroupContact(len(groups), len(groups))
    return found


def _draw_samples(
    trees: Sequence[RolloutTree], table: RewardTable, decode: Callable[[Sequence[int]], str]
) -> list[ContactSample]:
    """The deepest rollout of the first problems, turn by turn, up to `SAMPLES` turns."""
    found: list[ContactSample] = []
    for t, tree in enumerate(trees):
        last = tree.policy_segments[-1] if tree.policy_segments else None
        if last is None or len(found) >= SAMPLES:
            break
        read: list[int] = []
        for s in tree.path(last):
            segment = tree.segments[s]
            if segment.author == "policy":
                entries = {**table.turns.get((t, s), {}), **table.rollouts.get((t, s), {})}
                rewards = {}
                for name, entry in entries.items():
                    score = "no score" if entry.raw is None else f"{entry.raw:g}"
                    rewards[name] = f"{score} ({entry.reason})" if entry.reason else score
                wrote = decode(segment.token_ids)
                found.append(ContactSample(segment.kind, decode(read), wrote, rewards))
            read += segment.token_ids
    return found[:SAMPLES]


def _advise(
    setup: PhaseSetup,
    turns: Mapping[str, TurnContact],
    rewards: Mapping[str, RewardContact],
    groups: Mapping[str, GroupContact],
) -> Iterator[str]:
    """What to change where few turns have the asked form, or no group has a signal."""
    rollout = setup.spec.rollout
    for kind, turn in turns.items():
        missing = [name for name, share in turn.spans.items() if share < FEW]
        asked = rollout.turn_specs[setup.requested_kinds[kind]]
        if turn.truncated > FEW:
            yield (
                f"most {kind} turns are cut off after {asked.max_new_tokens} tokens: raise "
                "`max_new_tokens`, or ask for a shorter turn"
            )
        if not missing or (setup.environment is not None and len(missing) < len(turn.spans)):
            continue  # kinds of turns of an environment hold different spans
        first = missing[0]
        if not setup.plan.examples:
            yield (
                f"show the form of the {kind} turn in messages, not in words: `rollout.examples` "
                f"with two or more turns that hold <{first}>…</{first}>"
            )
        if not asked.prefix:
            yield f"begin the {kind} turn for the model: `prefix: <{first}>`"
        if setup.spec.model.warm_start is None:
            yield f"teach the form by a supervised start: `model.warm_start` ({kind})"
    if groups and not any(group.with_signal for group in groups.values()):
        for name, reward in rewards.items():
            if reward.mean is not None and reward.lowest == reward.highest:
                yield f"{name} is {reward.mean:g} for all: take problems that some answers solve"
            if reward.mean is None:
                yield f"{name} scored nothing: see its reasons"
