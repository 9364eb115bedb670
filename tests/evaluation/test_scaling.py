"""Several answers to one problem: pass@k, votes, and what their shares are worth."""

from itertools import combinations, permutations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rlx.evaluation.answers import ScoredAnswer, compute_pass_at_k, measure_answer_scaling


def answered(said, correct, confidence):
    """The answers to one problem."""
    return [
        ScoredAnswer(
            problem=0, problem_id="p", stratum="", sample=n, text="", said=text, correct=right,
            confidences=() if confidence is None else (confidence[n],), confidence_texts=(),
            rewards={}, tokens=1, truncated=False,
        )
        for n, (text, right) in enumerate(zip(said, correct, strict=True))
    ]  # fmt: skip


@given(st.integers(1, 9), st.data())
def test_pass_at_k_counts_the_subsets_with_a_correct_answer(n, data):
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    answers = [1] * correct + [0] * (n - correct)
    share = np.mean([max(taken) for taken in combinations(answers, k)])
    assert compute_pass_at_k(n, correct, k) == pytest.approx(share)


def test_a_confident_minority_wins_by_its_confidence_alone():
    split = answered(("8", "8", "7"), (0, 0, 1), (0.1, 0.2, 0.9))
    found = measure_answer_scaling([split], seed=0)
    assert found["k"] == [1, 2, 3]
    assert found["majority"][-1] == 0
    assert found["weighted"][-1] == found["most_confident"][-1] == 1
    assert found["pass_at"] == pytest.approx([1 / 3, 2 / 3, 1])
    assert found["vote_share_ece"][-1] == pytest.approx(2 / 3)


def test_answers_that_say_nothing_have_no_vote():
    found = measure_answer_scaling([answered((None, None, "7"), (0, 0, 1), None)], seed=0)
    assert found["majority"][-1] == 1
    assert found["weighted"] is None
    silent = measure_answer_scaling([answered((None, None), (0, 0), None)], seed=0)
    assert silent["majority"] == [0, 0]
    assert silent["vote_share_ece"] == [0, 0]


answers = st.lists(
    st.tuples(st.sampled_from(["1", "2", "3"]), st.sampled_from([0.0, 0.5, 1.0])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25)
@given(answers)
def test_votes_are_means_over_all_orders(answers):
    said, confidence = zip(*answers, strict=True)
    correct = tuple(int(text == "1") for text in said)
    found = measure_answer_scaling([answered(said, correct, confidence)], seed=3)
    for i, k in enumerate(found["k"]):
        rights = {"majority": [], "weighted": [], "most_confident": []}
        for order in permutations(range(len(said))):
            taken = order[:k]
            counts = {t: sum(said[n] == t for n in taken) for t in (said[n] for n in taken)}
            sums = {t: sum(confidence[n] for n in taken if said[n] == t) for t in counts}
            rights["majority"].append(max(counts, key=counts.get) == "1")
            rights["weighted"].append(max(sums, key=sums.get) == "1")
            rights["most_confident"].append(correct[max(taken, key=confidence.__getitem__)])
        for name, right in rights.items():
            exact = k in (1, len(said)) and len(set(right)) == 1
            close = 1e-9 if exact else 0.3  # 64 orders of at most 24
            assert found[name][i] == pytest.approx(np.mean(right), abs=close)
    assert all(
        m <= p + 1e-9 for m, p in zip(found["majority"][-1:], found["pass_at"][-1:], strict=True)
    )
