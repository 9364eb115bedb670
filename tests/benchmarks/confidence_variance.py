"""Variance of the gradient of one answer's confidences: sampled, and summed over their values.

    python tests/benchmarks/confidence_variance.py

Prints, for policies over the grid of .05, E |g - E g|² / |E g|² of the Brier score's gradient by
the logits: for 1 confidence with the policy's mean score as baseline, for 4 and 16 with the mean of
the others, each divided by its number of confidences, and for the sum over all values. Each is
estimated from 20 000 draws.
"""

import torch

from rlx.loss import compute_proper_scores

GRID = torch.arange(21, dtype=torch.float64) / 20
DRAWS = 20_000
POLICIES = {
    "uniform": torch.zeros(21, dtype=torch.float64),
    "near .7": -((GRID - 0.7) / 0.1).square(),
    "one bit: .1 or .9": -((GRID - 0.1).abs().minimum((GRID - 0.9).abs()) / 0.03).square(),
}


def exact_gradient(policy, scores):
    """`[V]` Σᵥ π(v) score(v) by the logits."""
    return policy * (scores - (policy * scores).sum())


def sampled_gradients(policy, scores, count, draw):
    """`[DRAWS, V]` estimates from `count` confidences each."""
    chosen = torch.multinomial(policy, DRAWS * count, replacement=True, generator=draw)
    rewards = scores[chosen].view(DRAWS, count)
    if count == 1:
        advantages = rewards - (policy * scores).sum()
    else:
        advantages = rewards - (rewards.sum(1, keepdim=True) - rewards) / (count - 1)
    taken = torch.zeros(DRAWS, len(policy), dtype=policy.dtype)
    taken.scatter_add_(1, chosen.view(DRAWS, count), advantages / count)
    return taken - policy * advantages.mean(dim=1, keepdim=True)


def main():
    draw = torch.Generator().manual_seed(0)
    print("| policy | 1 confidence | 4 | 16 | sum over values |\n| --- | --- | --- | --- | --- |")
    for name, logits in POLICIES.items():
        policy = logits.softmax(dim=0)
        (scores,) = compute_proper_scores(GRID, torch.ones(1, dtype=GRID.dtype), "brier")
        exact = exact_gradient(policy, scores)
        cells = []
        for count in (1, 4, 16):
            found = sampled_gradients(policy, scores, count, draw)
            spread = (found - exact).square().sum(dim=1).mean() / exact.square().sum()
            cells.append(f"{float(spread):.1f}")
        print(f"| {name} | {' | '.join(cells)} | 0 |")


if __name__ == "__main__":
    main()
