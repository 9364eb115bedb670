"""What is wrong with an experiment and shows only when something goes through it."""

import re
from collections.abc import Iterator, Mapping

import torch

from rlx.batch import NO_TURN
from rlx.plan.trial import Trial
from rlx.reward import NamedReward, RewardEntry
from rlx.rollout import Level, Segment
from rlx.spec.diagnostic import Diagnostic, KeyPath, printable
from rlx.step import RowRewards, TrainBatch

__all__ = ["findings"]

TRAILING = re.compile(r"<([A-Za-z_][\w-]*)>\s*$")
"""A tag that a template ends with, declared as a span or not: rewards look for such tags too."""

SHOWN = 160
"""Characters of a response that a message shows."""

Place = tuple[int, int]


def findings(trial: Trial, *, stand_ins: bool) -> Iterator[Diagnostic]:
    """Errors and warnings about one phase.

    Args:
        trial: of the phase.
        stand_ins: the problems are none of the task's, so a scorer's fault proves nothing.
    """
    for number, level in enumerate(trial.parts.plan.levels):
        yield from _template(level, is_first=number == 0)
        yield from _responses(trial, level)
    for reward in trial.parts.rewards:
        yield from _reward(trial, reward, stand_ins)
    if trial.train is None or trial.rewards is None:
        if not trial.table.faults:
            yield _stopped(trial)
        return
    yield from _mask(trial, trial.train, trial.rewards)
    yield from _advantages(trial, trial.train)
    if not trial.table.faults:  # what is left after a fault says little
        yield from _groups(trial.train)


def _stopped(trial: Trial) -> Diagnostic:
    if trial.rewards is None:
        return _error(("rewards",), f"nothing can be learned: {trial.stopped}")
    return _error(("credit", "on_missing_turn"), trial.stopped)


# Templates and spans ---------------------------------------------------------------------------


def _template(level: Level, *, is_first: bool) -> Iterator[Diagnostic]:
    """Tags of the turn's own spans that its template opens and never closes, or the reverse."""
    path: KeyPath = ("rollout", level.kind, "template")
    template, label = level.turn.template, f"rollout.{level.kind}.template"
    last = TRAILING.search(template)
    named = (*level.turn.spans, *((last[1],) if last else ()))
    for name in dict.fromkeys(named):
        opened, closed = template.count(f"<{name}>"), template.count(f"</{name}>")
        if opened > closed and not (is_first and name == "think"):
            ends_so = template.rstrip().endswith(f"<{name}>")
            what = "ends with" if ends_so else "opens"
            yield _found(
                path,
                f"{label} {what} <{name}> and never closes it: what the turn then writes has no "
                f"<{name}> of its own, so its span {name!r} is not found",
                f"let the turn write <{name}> itself, or close it in the template",
                is_error=ends_so,
            )
        elif closed > opened:
            yield _found(
                path,
                f"{label} closes <{name}>, which it never opened",
                f"write <{name}> before </{name}>, or leave both out",
                is_error=False,
            )


def _responses(trial: Trial, level: Level) -> Iterator[Diagnostic]:
    """Kinds of turn in which no span is ever found, or that never have the room to end."""
    turns = _turns(trial, level.kind)
    cut = sum(s.finish_reason == "length" for s in turns)
    if 2 * cut > len(turns):
        yield _warning(
            ("rollout", level.kind, "max_new_tokens"),
            f"rollout.{level.kind}.max_new_tokens is {level.turn.max_new_tokens}, and {cut} of "
            f"{len(turns)} made-up {level.kind}s take more",
            "give the turn room for all of its spans and the token that ends it",
        )
    elif level.turn.spans and turns and not any(s.spans for s in turns):
        yield _warning(
            ("rollout", level.kind, "spans"),
            f"no made-up {level.kind} has any of the spans {', '.join(level.turn.spans)}",
            "name the tags that the task's demonstrations write, or let the prompt ask for these",
        )


def _turns(trial: Trial, kind: str) -> list[Segment]:
    return [s for tree in trial.trees for s in tree.segments if s.kind == kind]


# Rewards -----------------------------------------------------------------------------------------


def _reward(trial: Trial, reward: NamedReward, stand_ins: bool) -> Iterator[Diagnostic]:
    path: KeyPath = ("rewards", reward.scope, reward.name)
    entries = list(_entries(trial, reward))
    fault = next(((p, e) for p, e in entries if e.is_fault), None)
    if fault is not None:
        yield _fault(trial, reward, *fault, path=path, stand_ins=stand_ins)
        return
    absent = all(e.raw is None for _, e in entries)
    if absent and not trial.table.faults and not reward.name.startswith("_"):
        where = "rollout" if reward.scope == "global" else reward.use.model_dump()["turn"]
        yield _warning(
            path,
            f"rewards.{reward.scope}.{reward.name} has a weight of {reward.use.weight:g} on a "
            f"reward that no made-up {where} produces",
            f"see that {reward.use.plugin!r} fits the task's records and this turn, or drop it",
        )


def _entries(trial: Trial, reward: NamedReward) -> Iterator[tuple[Place, RewardEntry]]:
    table = trial.table
    places: Mapping[Place, Mapping[str, RewardEntry]] = (
        table.rollouts if reward.scope == "global" else table.turns
    )
    for place, entries in places.items():
        if reward.name in entries:
            yield place, entries[reward.name]


def _fault(
    trial: Trial,
    reward: NamedReward,
    place: Place,
    entry: RewardEntry,
    *,
    path: KeyPath,
    stand_ins: bool,
) -> Diagnostic:
    segment = trial.trees[place[0]].segments[place[1]]
    why = (entry.reason or "it gave nothing").splitlines()[0]
    said = repr(segment.text[:SHOWN]) + ("…" if len(segment.text) > SHOWN else "")
    handled = reward.use.on_error != "fail"
    ends = "a run ends here; `on_error` would let it go on without the score"
    what_next = "a run goes on, as `on_error` says" if handled else ends
    given = "a problem that stands in for the task's own" if stand_ins else "a made-up response"
    return Diagnostic(
        kind="plugin",
        message=f"reward plugin {reward.use.plugin!r} (rewards.{reward.scope}.{reward.name}) "
        f"failed on {given}: {printable(why)}",
        path=path,
        helps=(f"rlx plugins check {reward.use.plugin}",),
        notes=(f"it was given: {said}", what_next),
        exit_code=3,
        severity="warning" if handled or stand_ins else "error",
    )


# Credit ------------------------------------------------------------------------------------------


def _mask(trial: Trial, train: TrainBatch, rewards: RowRewards) -> Iterator[Diagnostic]:
    name = trial.parts.spec.mask.plugin
    if not train.mask.any():
        yield _error(
            ("mask",),
            f"mask strategy {name!r} leaves no token of any made-up response to learn from",
            "look at the spans that the turns declare, and at the strategy's `fallback`",
        )
        return
    for kind in dict.fromkeys(row.kind for row in train.batch.rows):
        rows = torch.tensor([row.kind == kind for row in train.batch.rows])
        if not train.mask[rows].any():
            message = f"mask strategy {name!r} lets no token of a made-up {kind} learn"
            yield _warning(("mask",), message)
    lost = float(train.placed.lost.abs().sum())
    given = float(rewards.turn_rewards.abs().sum() + rewards.global_rewards.abs().sum())
    if lost and given:
        yield _warning(
            ("credit", "on_missing_turn"),
            f"{lost / given:.0%} of the reward lies on no token, since turns that earned it have "
            "none that learns",
            "`on_missing_turn: to_last_token` keeps it; or widen the mask",
        )
    foreign = train.mask & (train.batch.turn_ids == NO_TURN)
    if foreign.any() and trial.parts.spec.loss.old_logprobs == "behaviour":
        yield _error(
            ("mask",),
            f"mask strategy {name!r} lets tokens learn that the policy did not write, whose "
            "behaviour log-probabilities nobody knows",
            "loss.old_logprobs: learner",
        )


def _advantages(trial: Trial, train: TrainBatch) -> Iterator[Diagnostic]:
    name = trial.parts.spec.estimator.plugin
    if not torch.isfinite(train.advantages).all():
        message = f"estimator plugin {name!r} gives advantages that are not finite"
        yield Diagnostic(kind="plugin", message=message, path=("estimator",), exit_code=3)
    elif (train.advantages[~train.mask] != 0).any():
        message = f"estimator plugin {name!r} gives advantages to tokens that do not learn"
        yield Diagnostic(kind="plugin", message=message, path=("estimator",), exit_code=3)


def _groups(train: TrainBatch) -> Iterator[Diagnostic]:
    """Kinds of rows of which no group carries a signal."""
    if not train.mask.any():
        return
    for kind in dict.fromkeys(row.kind for row in train.batch.rows):
        rows = torch.tensor([row.kind == kind for row in train.batch.rows])
        alone = len(train.batch.group_ids[rows].unique()) == int(rows.sum())  # told when read
        if alone or not train.mask[rows].any() or (train.advantages[rows] != 0).any():
            continue
        scores = train.scores.total_score[rows]
        alike = bool((scores == scores[0]).all())
        why = f"every {kind} scored {float(scores[0]):g}" if alike else "all groups came out even"
        yield _warning(
            ("rewards",),
            f"no group of made-up {kind}s has a signal: {why}, so every advantage is 0",
            "look at the rewards below: what tells a good response from a poor one?",
        )


def _error(path: KeyPath, message: str, *helps: str) -> Diagnostic:
    return Diagnostic(kind="conflict", message=message, path=path, helps=helps)


def _warning(path: KeyPath, message: str, *helps: str) -> Diagnostic:
    return Diagnostic(kind="conflict", message=message, path=path, helps=helps, severity="warning")


def _found(path: KeyPath, message: str, help_: str, *, is_error: bool) -> Diagnostic:
    return (_error if is_error else _warning)(path, message, help_)
