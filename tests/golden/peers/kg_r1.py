"""The functions of KG-R1's verl fork on random rows: `python kg_r1.py SOURCES FILE`."""

import sys
from functools import partial

sys.path.insert(0, sys.argv[1])

import numpy as np
import torch
from records import Records, hide
from verl.trainer.ppo import core_algos as peer


def main() -> None:
    """Writes the records."""
    torch.set_default_dtype(torch.float64)
    records = Records("KG-R1 (arXiv 2509.26383), its fork of verl", rtol=1e-6, atol=1e-6)
    for number in range(3):
        add_outcome_estimators(records, number)
        add_token_estimators(records)
        add_turn_estimators(records)
        add_losses(records)
        add_kl(records)
    records.write()


def add_outcome_estimators(records: Records, number: int) -> None:
    """Estimators of one score per row."""
    scores, mask = records.draw_scores(8), records.draw_mask(8, 4)
    groups = np.array(["a", "a", "a", "b", "b", "b", "b", "c" if number else "b"])
    rewards = mask * 0
    rewards[:, 0] = scores
    baselines = records.random_tensor(8)
    given = records.give_scores(scores, mask, groups)
    grpo = peer.compute_grpo_outcome_advantage
    for name, compute in {
        "grpo": grpo,
        "dr_grpo": partial(grpo, norm_adv_by_std_in_grpo=False),
        "rloo": peer.compute_rloo_outcome_advantage,
        "opo": peer.compute_opo_outcome_advantage,
        "reinforce_plus_plus_baseline": (
            peer.compute_reinforce_plus_plus_baseline_outcome_advantage
        ),
    }.items():
        advantages, _ = compute(rewards, mask, groups)
        outputs = {"advantages": hide(advantages, mask)}
        records.add(f"estimators.{name}", given, outputs, {"singleton": "raw"})
    last = rewards * 0
    last[torch.arange(8), mask.sum(dim=1).long() - 1] = scores
    remax, _ = peer.compute_remax_outcome_advantage(last, baselines, mask)
    given_baselines = {**given, "greedy_scores": baselines}
    records.add("estimators.remax", given_baselines, {"advantages": hide(remax, mask)})
    pairs = np.array(list("aaaabbbb"))
    best, _ = peer.compute_grpo_passk_outcome_advantage(rewards, mask, pairs)
    given_pairs = {**given, "group_ids": pairs}
    records.add("estimators.pass_at_k", given_pairs, {"advantages": hide(best, mask)})


def add_token_estimators(records: Records) -> None:
    """Estimators of token rewards; GAE also with tokens of an environment."""
    _, mask = records.draw_scores(4), records.draw_mask(4, 5)
    values, gamma, lam = records.random_tensor(4, 5), 0.9, 0.8
    rewards = records.random_tensor(4, 5) * mask
    given = {"token_rewards": rewards, "mask": mask}
    plus, _ = peer.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma)
    records.add(
        "estimators.reinforce_plus_plus",
        given,
        {"advantages": hide(plus, mask)},
        {"gamma": gamma},
    )
    gaps = torch.tensor([[1.0, 1, 0, 1, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1], [1, 0, 1, 0, 1]])
    rewards = records.random_tensor(4, 5) * gaps
    advantages, returns = peer.compute_gae_advantage_return(rewards, values, gaps, gamma, lam)
    records.add(
        "estimators.gae",
        {"token_rewards": rewards, "values": values, "mask": gaps},
        {"advantages": hide(advantages, gaps), "returns": hide(returns, gaps)},
        {"gamma": gamma, "lam": lam, "environment": "literal", "whiten": True},
    )


def add_turn_estimators(records: Records) -> None:
    """Estimators of structured rewards."""
    draw = records.random
    turns = [[1, 1, -1, 2, 2], [1, -1, 2, 2, -1], [1, 1, 1, -1, -1], [1, -1, 2, -1, 3]]
    counts = [2, 2, 1, 3]
    structured = [
        {
            "turn_rewards": {k: draw.choice([0.0, 0.25, draw.random()]) for k in range(1, n + 1)},
            "global_rewards": {"exact_match": draw.random(), "_raw_exact_match": 1.0},
        }
        for n in counts
    ]
    ids = torch.tensor(turns)
    groups = np.array(["p", "p", "p", "q" if draw.random() < 0.5 else "p"])
    given = {
        "turn_rewards": [[s["turn_rewards"].get(k) for k in (1, 2, 3)] for s in structured],
        "global_rewards": [s["global_rewards"]["exact_match"] for s in structured],
        "turn_ids": turns,
        "mask": (ids > 0).int(),
        "group_ids": groups,
    }
    for name, compute in {
        "multiturn_grpo": peer.compute_grpo_multiturn_advantage,
        "uniform": peer.compute_grpo_uniform_advantage,
    }.items():
        advantages, _ = compute(structured, (ids > 0).double(), ids, groups)
        outputs = {"advantages": hide(advantages, ids > 0)}
        records.add(f"estimators.{name}", given, outputs, {"singleton": "raw"})


def add_losses(records: Records) -> None:
    """Token losses, one at a time, and their aggregation."""
    _, mask = records.draw_scores(3), records.draw_mask(3, 4)
    losses, kinds = records.random_tensor(3, 4), [0, 0, 0]
    given = {"losses": losses, "mask": mask, "kinds": kinds}
    for theirs, ours, lengths in (
        ("token-mean", "token_mean", None),
        ("seq-mean-token-mean", "sequence_mean", None),
        ("seq-mean-token-sum", "sequence_sum", None),
        # The peer divides the sum over rows by the width; rlx takes the mean over rows.
        ("seq-mean-token-sum-norm", "constant", [4 / 3] * 3),
    ):
        total = peer.agg_loss(losses, mask, theirs).item()
        more = {} if lengths is None else {"constant_lengths": lengths}
        records.add(
            "loss.aggregate_losses", {**given, **more}, {"value": total}, {"aggregate": ours}
        )
    ratios, advantages = records.random_tensor(12) * 2, records.random_tensor(12)
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    each = [
        peer.compute_policy_loss(zero, r.view(1, 1), a.view(1, 1), one, 0.2, 0.2, 0.28)[0].item()
        for r, a in zip(ratios, advantages, strict=True)
    ]
    records.add(
        "loss.clipped_surrogate",
        {"log_ratio": ratios, "advantages": advantages},
        {"value": each},
        {"clip": [0.2, 0.28], "dual_clip": 3.0},
    )
    old, new, returns = (records.random_tensor(12) for _ in range(3))
    why = "rlx takes half of the squared error"
    records.add_value_losses(peer.compute_value_loss, old, new, returns, why)


def add_kl(records: Records) -> None:
    """KL estimates, and the controller of the coefficient."""
    logprobs, reference = records.random_tensor(6) * 4, records.random_tensor(6) * 4
    records.add_kl(peer.kl_penalty, logprobs, reference)
    controller = peer.AdaptiveKLController(0.2, 0.1, 10_000)
    for current in (0.02, 0.2, 0.105, 0.0):
        before = controller.value
        controller.update(current, 64)
        records.add(
            "kl.adapt_beta",
            {"beta": before, "current_kl": current},
            {"value": float(controller.value)},
            {"target": 0.1, "horizon": 10_000, "steps": 64},
        )


if __name__ == "__main__":
    main()
