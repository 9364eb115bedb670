"""Metrics of one training step, under names that MLflow groups into sections."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.evaluation import (
    collect_stated_confidences,
    compute_identical_share,
    find_correctness_reward,
)
from rlx.kl import mean_kl
from rlx.loss import compute_sampler_mismatch
from rlx.record import get_stored_score_name
from rlx.reward import RewardTable
from rlx.rollout import RolloutTree
from rlx.run.environment_metrics import environment_figures
from rlx.spec import LossSpec
from rlx.train_batch import TrainBatch

if TYPE_CHECKING:
    from rlx.learner import CriticStats, UpdateStats  # bring DeepSpeed

__all__ = ["compute_mismatch_figures", "step_figures"]

MOST_PARTS = 20
"""Parts of one reward that become curves."""
_plain_name = re.compile(r"[A-Za-z0-9_.-]{1,40}").fullmatch


def step_figures(
    trees: Sequence[RolloutTree],
    table: RewardTable,
    train: TrainBatch,
    update: "UpdateStats | None",
    critic: "CriticStats | None",
    seconds: Mapping[str, float],
    correct: str,
    kinds: Sequence[str],
    players: int = 1,
) -> dict[str, float]:
    """All metrics of a step.

    Args:
        trees, table, train: the rollouts, their rewards and the training batch.
        update: statistics of the last optimiser step; None if no token carried a signal.
        critic: statistics of the critic's last update; None without a critic.
        seconds: wall time in seconds of "rollout", "reward", "train" and "step".
        correct: name of the correctness reward.
        kinds: kind of turn that is requested at each level of rows.
        players: how many trees there are for every problem, one for each player of self-play.
    """
    figures = {
        **_compute_reward_figures(trees, table),
        **_compute_player_figures(table, players),
        **_compute_part_figures(table),
        **_compute_turn_figures(trees),
        **_compute_row_figures(train, kinds),
        "rollout/dropped": float(len(table.dropped)),
        **_compute_calibration_figures(trees, table, correct),
        **_compute_credit_figures(train),
        **environment_figures(trees),
        **{f"perf/{name}_s": value for name, value in seconds.items()},
    }
    sampled = sum(len(s.token_ids) for t in trees for s in t.segments if s.author == "policy")
    figures["perf/tokens_per_s"] = sampled / seconds["step"]
    if update is not None:
        figures |= {
            "train/loss": update.loss,
            "train/entropy": update.entropy,
            "train/kl": update.kl,
            "train/clip_frac": update.clip_fraction,
            "train/ratio_max": update.ratio_max,
            "train/grad_norm": update.grad_norm,
            "train/lr": update.learning_rate,
            "perf/shared_prefix_ratio": update.row_tokens / max(1, update.computed_tokens),
        }
        if update.bonus_entropy is not None:
            figures["train/span_entropy"] = update.bonus_entropy
        if update.kl_loss is not None:
            figures["train/kl_loss"] = update.kl_loss
        if update.expected_score is not None and update.stated_mass is not None:
            figures["train/expected_score"] = update.expected_score
            figures["train/stated_mass"] = update.stated_mass
    if critic is not None:
        known = {n: value for n, value in asdict(critic).items() if value is not None}
        figures |= {f"critic/{name}": value for name, value in known.items()}
    figures["health/skipped_update"] = float(update is None)
    return figures


def _compute_credit_figures(train: TrainBatch) -> dict[str, float]:
    """The three scores, the reward lost in placement, and KL from the reference policy."""
    figures: dict[str, float] = {}
    for name, scores in vars(train.scores).items():
        stored = get_stored_score_name(name)
        figures[f"score/{stored}"] = float(scores.mean())
        figures[f"score/{stored}_std"] = float(scores.std(correction=0))
    figures["score/turns_without_tokens"] = float(train.placed.missing.sum())
    figures["score/lost"] = float(train.placed.lost.abs().sum())
    if train.kl is not None and train.mask.any():
        figures["kl/reference"] = float(mean_kl(train.kl, train.mask))
        figures["kl/beta"] = train.streams.beta
    return figures


def _compute_reward_figures(trees: Sequence[RolloutTree], table: RewardTable) -> dict[str, float]:
    raw: dict[str, list[float]] = {}
    totals: dict[str, list[float]] = {}
    for entries in (*table.turns.values(), *table.rollouts.values()):
        for entry in entries.values():
            if entry.raw is not None:
                raw.setdefault(entry.name, []).append(entry.raw)
    for t, s in table.turns:
        total = table.get_turn_total((t, s))
        if total is not None:
            totals.setdefault(trees[t].segments[s].kind, []).append(total)
    figures = {}
    for name, values in raw.items():
        figures[f"rewards/{name}/mean"] = float(np.mean(values))
        figures[f"rewards/{name}/std"] = float(np.std(values))
    for kind, values in totals.items():
        figures[f"train/reward_{kind}"] = float(np.mean(values))
        figures[f"train/reward_{kind}_std"] = float(np.std(values))
    figures["health/scorer_faults"] = float(sum(table.faults.values()))
    return figures


def _compute_player_figures(table: RewardTable, players: int) -> dict[str, float]:
    """Means of the rewards of each player, in self-play."""
    raw: dict[str, list[float]] = {}
    for (tree, _), entries in (*table.turns.items(), *table.rollouts.items()):
        for entry in entries.values():
            if entry.raw is not None and players > 1:
                raw.setdefault(f"{entry.name}/{tree % players}", []).append(entry.raw)
    return {f"players/{name}": float(np.mean(values)) for name, values in sorted(raw.items())}


def _compute_part_figures(table: RewardTable) -> dict[str, float]:
    """Means of the parts of scores, such as the share of confidences at the extremes.

    Rewards of others name their parts as they like: at most `MOST_PARTS` of a reward, of plain
    names, become curves. All of them are stored with the rollouts.
    """
    parts: dict[str, dict[str, list[float]]] = {}
    for entries in (*table.turns.values(), *table.rollouts.values()):
        for entry in entries.values():
            for part, value in entry.parts.items():
                if _plain_name(part):
                    parts.setdefault(entry.name, {}).setdefault(part, []).append(value)
    return {
        f"parts/{name}/{part}": float(np.mean(named[part]))
        for name, named in parts.items()
        for part in sorted(named)[:MOST_PARTS]
    }


def _compute_turn_figures(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Lengths and truncation of turns, by kind of turn."""
    turns = [s for t in trees for s in t.segments if s.author == "policy"]
    figures = {"rollout/no_span": float(np.mean([not s.spans for s in turns]))}
    for kind in sorted({s.kind for s in turns}):
        these = [s for s in turns if s.kind == kind]
        lengths = [len(s.token_ids) for s in these]
        figures[f"rollout/len_{kind}"] = float(np.mean(lengths))
        figures[f"rollout/len_{kind}_std"] = float(np.std(lengths))
        figures[f"rollout/truncated_{kind}"] = float(
            np.mean([s.finish_reason == "length" for s in these])
        )
    return figures


def _compute_row_figures(train: TrainBatch, kinds: Sequence[str]) -> dict[str, float]:
    """Signal of the rows, by the requested kind of their turns."""
    figures: dict[str, float] = {}
    levels, groups = train.batch.levels.numpy(), train.batch.group_ids.numpy()
    per_row = _row_means(train.advantages, train.mask)
    for level in np.unique(levels):
        rows, kind = levels == level, kinds[int(level)]
        silent = [not per_row[rows & (groups == g)].any() for g in np.unique(groups[rows])]
        figures[f"rollout/zero_signal_{kind}"] = float(np.mean(silent))
        figures[f"train/advantage_abs_{kind}"] = float(np.abs(per_row[rows]).mean())
    return figures


def _row_means(values: Tensor, mask: Tensor) -> np.ndarray:
    """`[B]` mean over each row's mask; 0 for a row with an empty mask."""
    counts = mask.sum(dim=1).clamp(min=1)
    means: np.ndarray = (values.where(mask, 0.0).sum(dim=1) / counts).numpy()
    return means


def _compute_calibration_figures(
    trees: Sequence[RolloutTree], table: RewardTable, correct: str
) -> dict[str, float]:
    """Calibration of the confidences stated for the answers: mean, gap, Brier score, spread."""
    answers = [
        (t, s)
        for t, tree in enumerate(trees)
        for s in tree.policy_segments
        if tree.segments[s].kind == "answer"
    ]
    stated = collect_stated_confidences(trees, table, answers)
    pairs: list[tuple[float, float]] = []
    for place, group in zip(answers, stated, strict=True):
        label = find_correctness_reward(table, trees[place[0]], place, correct)
        if label is not None:
            pairs += [(label, c) for c in group if not np.isnan(c)]
    alike = compute_identical_share(stated)
    if not pairs:
        return {}
    labels, stated_all = (np.array(column) for column in zip(*pairs, strict=True))
    spreads = [np.nanstd(g) for g in stated if len(g) > 1 and not np.isnan(g).all()]
    figures = {
        "calibration/conf_mean": float(stated_all.mean()),
        "calibration/gap": float(stated_all.mean() - labels.mean()),
        "calibration/brier": float(((stated_all - labels) ** 2).mean()),
    }
    if spreads:
        figures["calibration/conf_spread"] = float(np.mean(spreads))
    if alike is not None:
        figures["calibration/alike_share"] = alike
    if labels.std() > 0 and stated_all.std() > 0:
        figures["calibration/corr"] = float(np.corrcoef(labels, stated_all)[0, 1])
    return figures


def compute_mismatch_figures(
    train: TrainBatch,
    loss: LossSpec,
    first: "UpdateStats | None",
    compute_logprobs: Callable[[TokenBatch, Tensor], Tensor],
) -> dict[str, float]:
    """Compares the sampler's log-probabilities with the learner's before the update.

    If the learner computed old log-probabilities, they are compared on every trained token.
    Otherwise the statistics of the first optimiser step are used, at no extra cost. If there was
    no optimiser step, the weights are unchanged and the learner's log-probabilities are computed
    now.

    Args:
        train: the training batch, the same on every rank.
        loss: loss settings of the phase.
        first: statistics of the step's first optimiser step; None if there was none.
        compute_logprobs: computes the learner's log-probabilities of masked tokens, as
            `Learner.logprobs`.
    """
    figures: dict[str, float] = {}
    if loss.old_logprobs == "behaviour" and first is not None:
        figures["sampler/mismatch_k3"] = first.kl
        figures["sampler/mismatch_ratio_max"] = first.token_ratio_max
    elif train.sampled_mask.any():
        recompute = loss.old_logprobs == "behaviour"
        ours = (
            compute_logprobs(train.batch, train.sampled_mask)
            if recompute
            else train.streams.old_logprobs
        )
        if found := compute_sampler_mismatch(
            ours, train.batch.behaviour_logprobs, train.sampled_mask
        ):
            figures["sampler/mismatch_k3"] = found.k3
            figures["sampler/mismatch_ratio_max"] = found.ratio_max
            figures["sampler/mismatch_row_ratio_max"] = found.row_ratio_max
    if train.correction is not None:
        figures["sampler/correction_mean"] = train.correction.mean
        figures["sampler/correction_share"] = train.correction.share
    return figures
