"""Figures of one step, worked by hand."""

import math
from types import SimpleNamespace

import bound
import pytest
import token_trees
import torch
from trees import asked, entry, tree

from rlx.batch import build_token_batch
from rlx.phase_setup import CreditRules
from rlx.reward import RewardTable
from rlx.run.metrics import (
    MOST_PARTS,
    UPDATE_FIGURES,
    _compute_reward_figures,
    step_figures,
)
from rlx.spec import CreditSpec, LossSpec
from rlx.step import ScoredRows, TokenStreams, assign_credit

SECONDS = {"rollout": 1.0, "reward": 0.5, "train": 2.0, "step": 4.0}


def turn(parent, length, *, kind="answer", span=True, **more):
    whole = {kind: ((0, length), (0, length))} if span else {}
    return token_trees.turn(parent, *(1,) * length, kind=kind, **more, **whole)


def figures(answers, *, faults=(), update=None, mask=None):
    """One tree; each answer is (accuracy, [(Brier, stated confidence), ...])."""
    segments, turns = [asked()], {}
    for accuracy, confidences in answers:
        at = len(segments)
        segments.append(turn(0, 4 if accuracy else 2, reason="stop" if accuracy else "length"))
        turns[0, at] = {"accuracy": entry("accuracy", accuracy), "_len": entry("_len", 9.0)}
        segments.append(asked(at))
        for brier, stated in confidences:
            place = len(segments)
            unparsable = math.isnan(stated)
            segments.append(turn(at + 1, 1, kind="confidence", number=2, span=not unparsable))
            parts = {} if unparsable else {"confidence": stated}
            turns[0, place] = {"brier": entry("brier", brier, 2.0, **parts)}
    grown = tree(*segments[1:])
    table = RewardTable(turns, frozenset(), dict(faults))
    batch = build_token_batch([grown])
    totals = [table.get_turn_total((row.tree, row.segment)) for row in batch.rows]
    rewards = {
        "turn_rewards": torch.tensor(totals)[:, None].expand_as(batch.state_ids),
        "turn_present": batch.state_ids >= 0,
        "global_rewards": torch.zeros(len(totals)),
    }
    train = assign_credit(
        ScoredRows.join(batch, (mask or bound.mask("turn_spans"))(batch), **rewards),
        TokenStreams(old_logprobs=batch.behaviour_logprobs),
        CreditRules(
            estimator=centred,
            credit=CreditSpec(),
            loss=LossSpec(),
            max_tokens={"answer": 4, "confidence": 1},
        ),
    )
    return step_figures(
        [grown], table, train, update, None, SECONDS, "accuracy", ("answer", "confidence")
    )


def centred(inputs):
    return bound.estimator("two_level", normalize="center")(inputs)


TWO = [(1.0, [(0.96, 0.8), (0.75, 0.5)]), (0.0, [(0.91, 0.3), (0.91, 0.3)])]


def test_two_answers_with_two_confidences_each():
    f = figures(TWO, faults={"brier": 2, "accuracy": 1})
    by_hand = {
        "rewards/accuracy/mean": 0.5,
        "rewards/accuracy/std": 0.5,
        "rewards/accuracy/absent": 0.0,
        "rewards/brier/mean": 0.8825,
        "rewards/_len/mean": 9.0,
        "train/reward_answer": 0.5,  # `_len` is shown and never summed
        "train/reward_confidence": 1.765,  # weight 2
        "parts/brier/confidence": 0.475,
        "rollout/len_answer": 3.0,
        "rollout/len_answer_std": 1.0,
        "rollout/len_confidence_std": 0.0,
        "rollout/len_confidence": 1.0,
        "rollout/truncated_answer": 0.5,
        "rollout/truncated_confidence": 0.0,
        "rollout/zero_signal_answer": 0.0,
        "rollout/zero_signal_confidence": 0.5,
        "train/advantage_abs_answer": 0.5,
        "train/advantage_abs_confidence": 0.105,  # 2 · (0.105 + 0.105 + 0 + 0) / 4
        "rollout/dropped": 0.0,
        "rollout/no_span": 0.0,
        "calibration/conf_mean": 0.475,
        "calibration/gap": -0.025,
        "calibration/brier": (0.04 + 0.25 + 0.09 + 0.09) / 4,
        "calibration/conf_spread": 0.075,
        "calibration/alike_share": 0.5,
        "calibration/corr": 0.0875 / (0.5 * 0.2046338),
        "health/scorer_faults": 3.0,
        "health/skipped_update": 1.0,
        "perf/rollout_s": 1.0,
        "perf/tokens_per_s": 10 / 4,
    }
    assert {name: f[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-5)
    assert not any(name.startswith("train/loss") for name in f)


def test_absences_and_seconds_are_those_of_each_reward():
    parts = [
        RewardTable(
            {(0, 1): {"slow": entry("slow", score), "fast": entry("fast", 1.0)}},
            frozenset(),
            {},
            seconds=seconds,
        )
        for score, seconds in ((0.5, {"slow": 2.0, "fast": 0.25}), (None, {"slow": 1.0}))
    ]
    merged = RewardTable.merge_tables(parts, [[0], [1]])
    found = _compute_reward_figures([tree(turn(0, 1))] * 2, merged, players=1)
    expected = {
        "rewards/slow/absent": 0.5,
        "rewards/fast/absent": 0.0,
        "perf/reward/slow_s": 3.0,
        "perf/reward/fast_s": 0.25,
    }
    assert {name: found[name] for name in expected} == expected


def test_one_confidence_per_answer_is_still_measured():
    f = figures([(1.0, [(0.96, 0.8)]), (0.0, [(0.91, 0.3)])])
    assert f["calibration/brier"] == pytest.approx((0.04 + 0.09) / 2)
    assert "calibration/conf_spread" not in f and "calibration/alike_share" not in f


def test_unparsable_confidences_count_as_alike_and_in_no_average():
    f = figures([(1.0, [(0.0, math.nan), (0.0, math.nan)]), (0.0, [(0.91, 0.3), (0.0, math.nan)])])
    assert f["calibration/brier"] == pytest.approx(0.09)
    assert f["calibration/alike_share"] == 0.5
    assert f["rollout/no_span"] == pytest.approx(3 / 6)
    assert "calibration/corr" not in f


def test_rows_of_which_no_token_learns_are_silent():
    confidences = [(0.0, math.nan), (0.96, 0.8)]
    f = figures([(1.0, confidences), (0.0, confidences)], mask=literal)
    # 2 · (0.48 + 0) / 2 in both groups: the unparsable rows have no token to learn from
    assert f["train/advantage_abs_confidence"] == pytest.approx(0.48)
    assert f["rollout/zero_signal_confidence"] == 0.0
    unparsable = [(0.0, math.nan), (0.5, math.nan)]
    f = figures([(1.0, unparsable), (0.0, unparsable)], mask=literal)
    assert f["train/advantage_abs_confidence"] == 0.0
    assert f["rollout/zero_signal_confidence"] == 1.0


def literal(batch):
    return bound.mask("turn_spans", fallback="none")(batch)


def test_without_a_parsable_confidence_there_is_no_calibration():
    for confidences in ([], [(0.0, math.nan), (0.0, math.nan)]):
        f = figures([(1.0, confidences), (0.0, confidences)])
        assert not [name for name in f if name.startswith("calibration/")]


def test_what_the_optimiser_did():
    known = dict.fromkeys(UPDATE_FIGURES.values(), 0.5) | {"bonus_entropy": None}
    update = SimpleNamespace(**known, computed_tokens=10, row_tokens=25)
    f = figures(TWO, update=update)
    assert f["train/clip_frac"] == f["train/lr"] == 0.5
    assert "train/span_entropy" not in f
    assert f["perf/shared_prefix_ratio"] == 2.5
    assert f["health/skipped_update"] == 0.0
    assert all(math.isfinite(value) for value in f.values())


def test_the_three_scores_and_what_placement_lost():
    f = figures(TWO)
    # Totals: accuracy of two answers, twice the Brier of four confidences.
    totals = [1.0, 0.0, 2 * 0.96, 2 * 0.75, 2 * 0.91, 2 * 0.91]
    assert f["score/total_score"] == pytest.approx(sum(totals) / 6)
    assert f["score/token_level_scores"] == pytest.approx(sum(totals) / 6)
    assert f["score/turns_without_tokens"] == 0.0
    assert f["score/lost"] == 0.0
    assert not [name for name in f if name.startswith("kl/")]
    silent = figures(TWO, mask=lambda batch: batch.is_own & (batch.turn_ids == 2))
    assert silent["score/lost"] == pytest.approx(1.0)
    assert silent["score/turns_without_tokens"] == 2.0


def test_parts_are_curves_if_their_names_are_plain():
    def parts_of(*names):
        made = entry("score", 1.0, **dict.fromkeys(names, 0.5))
        table = RewardTable({}, frozenset(), {}, {(0, 1): {"score": made}})
        found = _compute_reward_figures([], table, players=1)
        return {name: value for name, value in found.items() if name.startswith("parts/")}

    assert parts_of("extreme", "format_lost_to_lastline") == {
        "parts/score/extreme": 0.5,
        "parts/score/format_lost_to_lastline": 0.5,
    }
    assert parts_of("", "a b", "x" * 41, "\x1b[31m", "../up", "ü") == {}
    assert len(parts_of(*(f"p{number}" for number in range(1000)))) == MOST_PARTS
