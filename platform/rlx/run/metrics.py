"""Metrics of a training step, under names that trackers group into sections."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.evaluation import (
    collect_stated_confidences,
    compute_identical_share,
    find_correctness_reward,
)
from rlx.kl import mean_kl
from rlx.loss import compute_sampler_mismatch
from rlx.plugin import Environment
from rlx.record import Recorder
from rlx.reward import RewardTable
from rlx.rollout import RolloutTree, is_fault_segment
from rlx.spec import LossSpec, MultiTurnRolloutSpec, RolloutSpec
from rlx.step import TrainBatch
from rlx_registry import IDLE_STEPS

if TYPE_CHECKING:
    from rlx.learner import CriticStats, UpdateStats


UPDATE_FIGURES = {
    "loss": "loss",
    "entropy": "entropy",
    "kl": "kl",
    "clip_frac": "clip_fraction",
    "ratio_max": "ratio_max",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "span_entropy": "bonus_entropy",
    "kl_loss": "kl_loss",
    "expected_score": "expected_score",
    "stated_mass": "stated_mass",
}
"""Metrics below `train/`, with the fields of `UpdateStats` that they show."""
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
        update: statistics of the last optimiser step; None if no token carried a signal.
        critic: statistics of the critic's last update; None without a critic.
        seconds: wall time in seconds, by stage.
        kinds: kind of turn that is requested at each level of rows.
        players: trees of every problem, one for each player of self-play.
    """
    figures = {
        **_compute_reward_figures(trees, table, players),
        **_compute_turn_figures(trees),
        **_compute_row_figures(train, kinds),
        "rollout/dropped": float(len(table.dropped)),
        **_compute_calibration_figures(trees, table, correct),
        "score/turns_without_tokens": float(train.placed.missing.sum()),
        "score/lost": float(train.lost.abs().sum()),
        **environment_figures(trees),
        **{f"perf/{name}_s": value for name, value in seconds.items()},
    }
    for name, scores in vars(train.scores).items():
        figures[f"score/{name}"] = float(scores.mean())
        figures[f"score/{name}_std"] = float(scores.std(correction=0))
    if train.kl is not None and train.mask.any():
        figures["kl/reference"] = float(mean_kl(train.kl, train.mask))
        figures["kl/beta"] = train.streams.beta
    sampled = sum(len(s.token_ids) for t in trees for s in t.segments if s.author == "policy")
    figures["perf/tokens_per_s"] = sampled / seconds["step"]
    if update is not None:
        told = {f"train/{name}": getattr(update, field) for name, field in UPDATE_FIGURES.items()}
        figures |= {name: value for name, value in told.items() if value is not None}
        figures["perf/shared_prefix_ratio"] = update.row_tokens / max(1, update.computed_tokens)
    if critic is not None:
        known = {n: value for n, value in asdict(critic).items() if value is not None}
        figures |= {f"critic/{name}": value for name, value in known.items()}
    figures["health/skipped_update"] = float(update is None)
    return figures


def _compute_reward_figures(
    trees: Sequence[RolloutTree], table: RewardTable, players: int
) -> dict[str, float]:
    """Rewards by name, their parts, and in self-play by player; totals by kind of turn.

    Of each reward at most `MOST_PARTS` parts, of plain names, become curves; all are stored with
    the rollouts.
    """
    raw, by_player = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    absent, totals = defaultdict[str, list[bool]](list), defaultdict[str, list[float]](list)
    parts: dict[str, dict[str, list[float]]] = {}
    for (tree, _), entries in (*table.turns.items(), *table.rollouts.items()):
        for entry in entries.values():
            absent[entry.name].append(entry.raw is None)
            if entry.raw is not None:
                raw[entry.name].append(entry.raw)
                by_player[f"{entry.name}/{tree % players}"].append(entry.raw)
            for part, value in entry.parts.items():
                if _plain_name(part):
                    parts.setdefault(entry.name, {}).setdefault(part, []).append(value)
    for t, s in table.turns:
        total = table.get_turn_total((t, s))
        if total is not None:
            totals[trees[t].segments[s].kind].append(total)
    figures = {f"rewards/{name}/absent": float(np.mean(there)) for name, there in absent.items()}
    figures |= {f"perf/reward/{name}_s": seconds for name, seconds in table.seconds.items()}
    for name, values in raw.items():
        figures[f"rewards/{name}/mean"] = float(np.mean(values))
        figures[f"rewards/{name}/std"] = float(np.std(values))
    for kind, values in totals.items():
        figures[f"train/reward_{kind}"] = float(np.mean(values))
        figures[f"train/reward_{kind}_std"] = float(np.std(values))
    for name, values in sorted(by_player.items()) if players > 1 else ():
        figures[f"players/{name}"] = float(np.mean(values))
    for name, named in parts.items():
        for part in sorted(named)[:MOST_PARTS]:
            figures[f"parts/{name}/{part}"] = float(np.mean(named[part]))
    figures["health/scorer_faults"] = float(sum(table.faults.values()))
    return figures


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
    """Signal of the rows, by the requested kind of their turns; rows below a fork of an agent's
    history are of the kind of those above."""
    figures: dict[str, float] = {}
    levels = np.minimum(train.batch.levels.numpy(), len(kinds) - 1)
    groups = train.batch.group_ids.numpy()
    counts = train.mask.sum(dim=1).clamp(min=1)
    per_row = (train.advantages.where(train.mask, 0.0).sum(dim=1) / counts).numpy()
    for level in np.unique(levels):
        rows, kind = levels == level, kinds[int(level)]
        silent = [not per_row[rows & (groups == g)].any() for g in np.unique(groups[rows])]
        figures[f"rollout/zero_signal_{kind}"] = float(np.mean(silent))
        figures[f"train/advantage_abs_{kind}"] = float(np.abs(per_row[rows]).mean())
    return figures


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
    Otherwise the statistics of the first optimiser step are used, at no extra cost. Without one,
    the learner computes them now, with unchanged weights.

    """
    figures: dict[str, float] = {}
    if loss.old_logprobs == "behaviour" and first is not None:
        figures["sampler/mismatch_k3"] = first.kl
        figures["sampler/mismatch_ratio_max"] = first.token_ratio_max
    elif train.sampled_mask.any():
        ours, theirs = train.streams.old_logprobs, train.batch.behaviour_logprobs
        if loss.old_logprobs == "behaviour":
            ours = compute_logprobs(train.batch, train.sampled_mask)
        if found := compute_sampler_mismatch(ours, theirs, train.sampled_mask):
            figures["sampler/mismatch_k3"] = found.k3
            figures["sampler/mismatch_ratio_max"] = found.ratio_max
            figures["sampler/mismatch_row_ratio_max"] = found.row_ratio_max
    if train.correction is not None:
        figures["sampler/correction_mean"] = train.correction.mean
        figures["sampler/correction_share"] = train.correction.share
    return figures


MOST_KEYS, MOST_VALUES = 50, 20
"""Maximum number of `info` keys, first by name, and of values per key, most frequent first."""
_LONGEST_WORD = 40
_LARGEST = 1e18
"""Numbers above it are left out; JSON integers are unbounded."""


def environment_figures(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Metrics of the turns, tokens, kinds and `info` of a step's rollouts.

    Returns:
        Empty if no environment wrote or reported anything. Otherwise, under `environment/`:
        `turns` and `turns_max`, mean and maximum number of turns of a rollout; `tokens_per_turn`
        of the policy; `token_share`, the environment's share of the response tokens; `finished`,
        the share of rollouts with nothing after their last turn; `faults`, how often the
        environment failed; `turn/KIND`, the share of turns of each kind; `info/KEY`, the mean of a
        boolean or number over the turns that have it; and `info/KEY/VALUE`, the share of each word
        among the turns whose KEY is a text.
    """
    driven = any(s.author == "environment" or s.info for t in trees for s in t.segments)
    rollouts = [[t.segments[i] for i in t.path(last)] for t in trees for last in t.rollouts]
    if not driven or not rollouts:
        return {}
    lengths = [sum(s.author == "policy" for s in path) for path in rollouts]
    turns = [s for path in rollouts for s in path if s.author == "policy"]
    policy_tokens = sum(len(s.token_ids) for s in turns)
    environment_tokens = sum(
        len(s.token_ids) for path in rollouts for s in path if s.author == "environment"
    )
    # One that is cut off has an observation after its last turn.
    continued = {(t, s.parent) for t, tree in enumerate(trees) for s in tree.segments}
    finished = [
        (t, last) not in continued for t, tree in enumerate(trees) for last in tree.rollouts
    ]
    info: dict[str, list[object]] = {}
    for turn in turns:
        for key, value in turn.info.items():
            info.setdefault(_sanitize_metric_name(key), []).append(value)
    figures = {
        "turns": float(np.mean(lengths)),
        "turns_max": float(max(lengths)),
        "tokens_per_turn": policy_tokens / len(turns),
        "token_share": environment_tokens / (environment_tokens + policy_tokens),
        "finished": float(np.mean(finished)),
        "faults": float(sum(is_fault_segment(s) for t in trees for s in t.segments)),
        **{
            f"turn/{kind}": share
            for kind, share in _compute_word_shares([s.kind for s in turns]).items()
        },
    }
    for key in sorted(info)[:MOST_KEYS]:
        numbers = [float(v) for v in info[key] if isinstance(v, int | float) and abs(v) <= _LARGEST]
        if numbers:
            figures[f"info/{key}"] = float(np.mean(numbers))
        shares = _compute_word_shares([v for v in info[key] if isinstance(v, str)])
        figures |= {f"info/{key}/{word}": share for word, share in shares.items()}
    return {f"environment/{name}": value for name, value in figures.items()}


def _compute_word_shares(texts: Sequence[str]) -> Mapping[str, float]:
    """The shares of the most frequent words; longer texts count in the total but are not named."""
    words = Counter(_sanitize_metric_name(text) for text in texts if len(text) <= _LONGEST_WORD)
    commonest = sorted(words, key=lambda word: (-words[word], word))[:MOST_VALUES]
    return {word: words[word] / len(texts) for word in commonest}


def _sanitize_metric_name(text: str) -> str:
    """A text as part of a metric name, in characters that every tracker accepts."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text[:_LONGEST_WORD]) or "_"


class GpuPeaks:
    """Reads the peak of each stage; nothing on a CPU.

    Attributes:
        figures: by the metric's name, GiB that torch had allocated at the peak of the stage, GiB
            that it held in reserve with them, and how often it had to empty its cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.figures: dict[str, float] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def end(self, stage: str) -> None:
        """Ends a stage, and begins the next one."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            held = torch.cuda.max_memory_reserved(self._device)
            retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)
            self.figures[f"perf/memory_{stage}_gib"] = peak / 2**30
            self.figures[f"perf/memory_reserved_{stage}_gib"] = held / 2**30
            self.figures["perf/memory_retries"] = float(retries)
            torch.cuda.reset_peak_memory_stats(self._device)


SUSTAINED = 3
"""Consecutive steps that must show the pattern, and first steps that form the baseline."""
FULL, RISE, REPEATS = 0.85, 1.4, 0.10
"""Thresholds: share of the allowed turns, growth of turns, share of turns that repeat others."""
_TURNS = "environment/turns"


def find_over_querying(
    history: Sequence[Mapping[str, float]], max_turns: int, repeats: str = ""
) -> str | None:
    """Detects a policy that queries its environment excessively.

    That is the case if, for several steps in a row, rollouts use nearly all allowed turns, and
    either many turns repeat earlier ones or turns have grown far beyond those of the first steps.

    `history` has the metrics of all steps of the phase; `repeats` is that of the environment.
    """
    steps = [figures for figures in history if _TURNS in figures]
    if len(steps) < SUSTAINED:
        return None
    first, latest = steps[:SUSTAINED], steps[-SUSTAINED:]
    began = float(np.mean([figures[_TURNS] for figures in first]))
    name = f"environment/info/{repeats}"
    if not all(
        figures[_TURNS] >= FULL * max_turns
        and (figures.get(name, 0.0) >= REPEATS or figures[_TURNS] >= RISE * began)
        for figures in latest
    ):
        return None
    turns = float(np.mean([figures[_TURNS] for figures in latest]))
    repeated = [figures[name] for figures in latest if name in figures]
    also = f", and {np.mean(repeated):.0%} of the queries repeat earlier ones" if repeated else ""
    return (
        f"over-querying: rollouts now take {turns:.1f} of {max_turns} turns on average, up from "
        f"{began:.1f} at the start of the phase{also}. The usual cause is that every extra "
        "turn earns reward: turn rewards are summed, not averaged (set credit.turn_reduce: mean "
        "to average them), or a repeated query is rewarded like a new one"
    )


def find_no_gradient(step: int, history: Sequence[Mapping[str, float]]) -> str | None:
    """Detects that the latest steps changed nothing: no token of any group had an advantage."""
    latest = history[-IDLE_STEPS:]
    if len(latest) < IDLE_STEPS or not all(
        not figures.get("train/grad_norm")
        and all(v == 1 for n, v in figures.items() if n.startswith("rollout/zero_signal_"))
        for figures in latest
    ):
        return None
    return (
        f"no gradient: steps {step - IDLE_STEPS + 1} to {step} changed nothing, as no token had an "
        "advantage. The usual cause is that all responses to a problem score alike: look at them "
        "and at what the model read with rlx samples, and at the credit of each token with rlx plan"
    )


class AlarmWatch:
    """Watches the metrics of a phase and raises an alarm when what it warns of begins."""

    def __init__(self, rollout: RolloutSpec, environment: Environment | None) -> None:
        self._repeats = environment.repeats if environment is not None else ""
        self._max_turns = rollout.max_turns if isinstance(rollout, MultiTurnRolloutSpec) else None
        self._history: list[Mapping[str, float]] = []
        self._raised: set[str] = set()

    def observe_step(
        self, step: int, figures: Mapping[str, float], recorder: Recorder | None
    ) -> None:
        """Adds the metrics of a step; an alarm is recorded if there is a recorder."""
        self._history.append(figures)
        alarms = {"no_gradient": find_no_gradient(step, self._history)}
        if self._max_turns is not None and "over_querying" not in self._raised:
            alarms["over_querying"] = find_over_querying(
                self._history, self._max_turns, self._repeats
            )
        for kind, warning in alarms.items():
            if warning is None:
                self._raised.discard(kind)
            elif kind not in self._raised:
                self._raised.add(kind)
                if recorder is not None:
                    recorder.announce(kind, warning)
