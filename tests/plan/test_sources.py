"""The recipes of the sources: their plans show the formulas and figures that are printed there."""

from collections import defaultdict
from statistics import mean, pstdev, stdev

import pytest
from rows import each_row

WEIGHTS = {
    "kg_query_validity": 0.1,
    "is_answer_score": 0.1,
    "format_score": 0.15,
    "exact_match": 0.3,
    "retrieval_quality": 0.4,
}
"""As printed for KG-R1."""
CONFIDENCE = ("<confidence>", "</confidence>")


@pytest.fixture
def rows(plan):
    """The rows of a recipe's only phase."""

    def list_rows(name, *overrides):
        (phase,) = plan(f"sources/{name}", *overrides).phases
        return phase.rows

    return list_rows


def add_rewards(row):
    """Reward of each turn, and of the whole rollout: weights times raw values."""
    turns, overall = defaultdict(float), 0.0
    for reward in row.rewards:
        assert reward.weight == WEIGHTS[reward.name]
        if reward.turn is None:
            overall += reward.weight * reward.raw
        elif reward.raw is not None:
            turns[reward.turn] += reward.weight * reward.raw
    return turns, overall


def list_learning(row):
    return [token for token in row.tokens if token.learns]


@each_row("name", ["kg_r1", "kg_r1_grpo"])
def test_a_total_score_is_the_mean_of_turns_plus_the_sum_of_globals(rows, name):
    best = 0.0
    for row in rows(name):
        turns, overall = add_rewards(row)
        assert row.score == pytest.approx(mean(turns.values()) + overall)
        assert all((token.author == "policy") == token.learns for token in row.tokens)
        best = max(best, row.score)
    assert best == pytest.approx(0.25 + 0.3 + 0.4)


def test_rewards_are_spread_over_turns_and_rollout_less_kl(rows):
    sums = set()
    for row in rows("kg_r1"):
        turns, overall = add_rewards(row)
        learning = list_learning(row)
        for token in learning:
            size = sum(other.turn == token.turn for other in learning)
            placed = turns[token.turn] / size + overall / len(learning)
            assert sum(token.placed.values()) == pytest.approx(placed, abs=1e-6)
            assert token.kl == pytest.approx(token.old_logprob - token.reference_logprob, abs=1e-6)
            assert token.reward == pytest.approx(placed - 0.001 * token.kl, abs=1e-6)
        total = sum(sum(token.placed.values()) for token in row.tokens)
        assert total == pytest.approx(sum(turns.values()) + overall, abs=1e-5)
        sums.add(round(total, 6))
    assert 0.25 * 3 + 0.7 in sums, "three good turns, a right answer"


def test_returns_are_rewards_to_go_and_advantages_whitened(rows):
    raw, shown = [], []
    for row in rows("kg_r1"):
        learning = list_learning(row)
        for at, token in enumerate(learning):
            to_go = sum(other.reward for other in learning[at:])
            assert token.target == pytest.approx(to_go, abs=1e-5)
            raw.append(token.target - token.value)
            shown.append(token.advantage)
    center, sigma = mean(raw), stdev(raw)
    assert shown == pytest.approx([(a - center) / sigma for a in raw], abs=1e-4)


def test_turns_and_globals_are_compared_apart(rows):
    groups = defaultdict(list)
    for row in rows("kg_r1_grpo"):
        groups[row.group].append((row, *add_rewards(row)))
    for members in groups.values():
        pooled = [reward for _, turns, _ in members for reward in turns.values()]
        overall = [total for _, _, total in members]
        assert stdev(pooled) > 0 and stdev(overall) > 0
        for row, turns, total in members:
            alike = (total - mean(overall)) / (stdev(overall) + 1e-6)
            for token in list_learning(row):
                own = (turns[token.turn] - mean(pooled)) / (stdev(pooled) + 1e-6)
                assert token.advantage == pytest.approx(0.5 * own + alike, abs=1e-4)


def test_answers_and_confidences_are_normalized_by_population_sigma(plan):
    (phase,) = plan("sources/rlcr_two_turn").phases
    deviations = {group.group: group.std for group in phase.groups}
    groups = defaultdict(list)
    for row in phase.rows:
        groups[row.group].append(row)
    assert {len(members) for members in groups.values()} == {4}
    for number, members in groups.items():
        scores = [row.score for row in members]
        assert pstdev(scores) > 0
        assert deviations[number] == pytest.approx(pstdev(scores))
        for row in members:
            expected = (row.score - mean(scores)) / (pstdev(scores) + 1e-4)
            for token in list_learning(row):
                assert token.advantage == pytest.approx(expected, abs=1e-5)


def test_a_confidence_earns_one_minus_its_squared_distance_from_its_own_answer(rows):
    by_number = {row.row: row for row in rows("rlcr_two_turn")}
    earned = set()
    for row in by_number.values():
        if row.parent is None:
            assert row.score in (0.0, 1.0)
            continue
        assert {reward.name for reward in row.rewards} == {"_form", "brier"}
        stated = [token.text for token in row.tokens if token.text.startswith("0.")]
        if not any(token.text == "</confidence>" for token in row.tokens):
            assert row.score == 0.0
            continue
        distance = by_number[row.parent].score - float(stated[0])
        assert row.score == pytest.approx(1 - distance**2, abs=1e-6)
        earned.add(by_number[row.parent].score)
    assert earned == {0.0, 1.0}


def test_only_spans_learn_and_every_learning_token_weighs_the_same(rows):
    learning = []
    for row in rows("rlcr_two_turn"):
        mine = list_learning(row)
        first, last = ("<think>", "</answer>") if row.parent is None else CONFIDENCE
        closed = any(token.text == last for token in row.tokens)
        assert not closed or not row.tokens[-1].learns or row.finish_reason == "length"
        if mine:
            assert mine[0].text == first
            assert mine[-1].text == last if closed else row.tokens[-1].learns
            start = next(i for i, token in enumerate(row.tokens) if token.learns)
            assert list(row.tokens[start : start + len(mine)]) == mine, "words between spans learn"
        learning += mine
    assert [t.weight for t in learning] == pytest.approx([1 / len(learning)] * len(learning))
