"""Functions of verl 0.9.1 on random ragged rows: `python verl_0_9_1.py SOURCES FILE [SEED]`."""

import sys
from functools import partial

sys.path.insert(0, sys.argv[1])

import numpy as np
import torch
from records import Records, hide, take_gradient
from verl.trainer.ppo import core_algos as peer
from verl.workers.config import ActorConfig

ROWS, WIDTH = 7, 5
GROUPS = np.array(list("aaabbcc"))
AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
}


def main() -> None:
    """Writes the records."""
    torch.set_default_dtype(torch.float64)
    records = Records("verl 0.9.1", rtol=1e-5, atol=5e-6)
    for _ in range(3):
        add_outcome_estimators(records)
        add_named_rewards(records)
        add_token_estimators(records)
        add_losses(records)
        add_sequence_losses(records)
        add_covariances(records)
        add_kl(records)
    records.write()


def add_outcome_estimators(records: Records) -> None:
    """Estimators of one score per row, under the profile verl."""
    scores, mask = records.draw_scores(ROWS), records.draw_mask(ROWS, WIDTH)
    groups = np.array(list("aaabbcd"))
    rewards = mask * 0
    rewards[:, 0] = scores
    single, given = {"singleton": "raw"}, records.give_scores(scores, mask, groups)
    for name, compute, options in (
        ("grpo", peer.compute_grpo_outcome_advantage, single),
        ("rloo", peer.compute_rloo_outcome_advantage, single),
        ("rloo", peer.compute_rloo_vectorized_outcome_advantage, single),
        ("opo", peer.compute_opo_outcome_advantage, single),
        ("gpg", peer.compute_gpg_outcome_advantage, {**single, "alpha": "scores"}),
        (
            "reinforce_plus_plus_baseline",
            peer.compute_reinforce_plus_plus_baseline_outcome_advantage,
            single,
        ),
    ):
        advantages, _ = compute(rewards.clone(), mask, groups)
        if compute is peer.compute_rloo_vectorized_outcome_advantage:
            options = {}  # it gives a group of one 0
        records.add(f"estimators.{name}", given, {"advantages": hide(advantages, mask)}, options)
    rest = mask * records.random_tensor(ROWS, WIDTH)
    greedy = records.random_tensor(ROWS)
    last = mask * 0
    last[torch.arange(ROWS), mask.sum(dim=1).long() - 1] = scores
    for placed in (last, rest):
        advantages, _ = peer.compute_remax_outcome_advantage(placed, greedy, mask)
        records.add(
            "estimators.remax",
            {"token_rewards": placed, "mask": mask, "greedy_scores": greedy},
            {"advantages": hide(advantages, mask)},
            {"returns": "to_go"},
        )


def add_named_rewards(records: Records) -> None:
    """GDPO."""
    mask = records.draw_mask(ROWS, WIDTH)
    named = {name: records.draw_scores(ROWS) for name in ("correct", "format", "length")}
    weights = [1.0, 0.5, records.random.uniform(-1, 2)]
    advantages, _ = peer.compute_gdpo_outcome_advantage(
        mask * 0,
        mask,
        GROUPS,
        config={"gdpo_reward_keys": list(named), "gdpo_reward_weights": weights},
        non_tensor_batch={name: values.numpy() for name, values in named.items()},
        batch={"prompts": torch.zeros(ROWS, 1), "attention_mask": pad_left(mask).long()},
    )
    records.add(
        "estimators.gdpo",
        {
            "named_rewards": torch.stack(list(named.values()), dim=1).float(),
            "reward_weights": weights,
            "mask": mask,
            "group_ids": GROUPS,
        },
        {"advantages": hide(advantages, mask)},
        {"singleton": "raw", "renormalize": "tokens"},
    )


def pad_left(mask: torch.Tensor) -> torch.Tensor:
    """The mask with one prompt token."""
    return torch.cat([torch.ones(len(mask), 1), mask], dim=1)


def add_token_estimators(records: Records) -> None:
    """Estimators of token rewards, with tokens of an environment between turns."""
    mask, values = records.draw_mask(ROWS, WIDTH, gaps=True), records.random_tensor(ROWS, WIDTH)
    rewards, gamma, lam = mask * records.random_tensor(ROWS, WIDTH), 0.9, 0.8
    given = {"token_rewards": rewards, "mask": mask}
    advantages, returns = peer.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    records.add(
        "estimators.gae",
        {**given, "values": values},
        {"advantages": hide(advantages, mask), "returns": hide(returns, mask)},
        {"gamma": gamma, "lam": lam, "whiten": True},
    )

    chosen = records.random_tensor(ROWS, WIDTH).abs() * 0.9 + 0.05
    collisions = chosen.square() + (1 - chosen).square() * records.random_tensor(ROWS, WIDTH).abs()
    groups = np.array(list("aaabbcd"))
    given |= {"old_logprobs": chosen.log(), "collision_probs": collisions}
    for gapless in (False, True):
        if gapless:
            mask = records.draw_mask(ROWS, WIDTH)
            given |= {"mask": mask, "token_rewards": rewards * mask}
            compute = peer.compute_optimal_token_baseline_advantage
        else:
            compute = peer.compute_multi_turn_optimal_token_baseline_advantage
        advantages, _ = compute(rewards, mask, groups, chosen.log(), collisions)
        records.add(
            "estimators.optimal_token_baseline",
            {**given, "group_ids": groups},
            {"advantages": hide(advantages, mask)},
            {"singleton": "raw"},
        )


def configure(**settings: object) -> ActorConfig:
    """The settings of an actor."""
    needed = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    policy_loss = settings.pop("policy_loss", {})
    config = ActorConfig(**needed, **settings)
    for name, value in policy_loss.items():
        object.__setattr__(config.policy_loss, name, value)
    return config


def add_losses(records: Records) -> None:
    """Losses of tokens with their gradient, in every aggregation."""
    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    ours = {"clip": [0.2, 0.28]}
    for name, settings, options in (
        ("vanilla", {"clip_ratio_c": 3.0}, {"surrogate": "clip", "dual_clip": 3.0}),
        ("cispo", {}, {"surrogate": "cispo"}),
        ("dppo_tv", {"clip_ratio_c": 20.0}, {"surrogate": "dppo_tv", "ratio_cap": 20.0}),
        ("dppo_kl", {"clip_ratio_c": 3.0}, {"surrogate": "dppo_kl", "ratio_cap": 3.0}),
        (
            "sapo",
            {"tau_pos": 0.8, "tau_neg": 1.3},
            {"surrogate": "sapo", "temperatures": [0.8, 1.3]},
        ),
        ("gspo", {}, {"ratio": "sequence_token", "dual_clip": None}),
    ):
        drawn = records.draw_policy(ROWS, WIDTH)
        for theirs, aggregate in AGGREGATES.items():
            if name == "sapo" and theirs != "seq-mean-token-mean":
                continue  # it has but one
            loss = peer.get_policy_loss_fn(name)
            config = configure(**clip, **settings)
            add_policy(
                records, loss, drawn, config, {**ours, **options, "aggregate": aggregate}, theirs
            )
    on_policy = records.draw_policy(ROWS, WIDTH, spread=0.0)
    options = {"surrogate": "none", "aggregate": "token_mean"}
    add_policy(records, peer.compute_policy_loss_gpg, on_policy, configure(), options, value=False)
    off_policy = records.draw_policy(ROWS, WIDTH)
    why = "verl's GPG is -A log π, rlx weighs it by the ratio: equal on-policy only"
    gpg = peer.compute_policy_loss_gpg
    add_policy(records, gpg, off_policy, configure(), options, differs=why)
    unweighted = {**options, "surrogate": "cispo", "clip": [1e-9, 1e-9]}
    add_policy(records, gpg, off_policy, configure(), unweighted)
    old, new, returns = (records.random_tensor(12) for _ in range(3))
    compute = partial(peer.compute_value_loss, loss_agg_mode="token-mean")
    records.add_value_losses(compute, old, new, returns)


def add_sequence_losses(records: Records) -> None:
    """GMPO, whose advantage is one per row."""
    drawn = records.draw_policy(ROWS, WIDTH, per_row=True)
    config = configure(clip_ratio=0.4, clip_ratio_low=0.3, clip_ratio_high=0.4)
    options = {"surrogate": "log_clip", "ratio": "sequence", "clip": [0.3, 0.4]}
    loss = peer.compute_policy_loss_geo_mean
    add_policy(records, loss, drawn, config, {**options, "aggregate": "sequence_mean"})


def add_covariances(records: Records) -> None:
    """Clip-Cov, where every candidate is drawn, and KL-Cov."""
    drawn = records.draw_policy(ROWS, WIDTH, spread=0.1)
    drawn["choice_logprobs"] = drawn["logprobs"]
    bounds = {"clip_cov_lb": 0.05, "clip_cov_ub": 0.6}
    config = configure(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        policy_loss={"clip_cov_ratio": 1.0, **bounds},
    )
    options = {"dual_clip": None, "clip": [0.2, 0.2], "aggregate": "token_mean"}
    rule = {"kind": "clip", "fraction": 1.0, "low": 0.05, "high": 0.6}
    loss = peer.compute_policy_loss_clip_cov
    add_policy(records, loss, drawn, config, {**options, "covariance": rule})
    config = configure(policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7})
    options = {"surrogate": "none", "aggregate": "token_mean"}
    rule = {"kind": "kl", "fraction": 0.2, "coefficient": 0.7}
    loss = peer.compute_policy_loss_kl_cov
    add_policy(records, loss, drawn, config, {**options, "covariance": rule})


def add_policy(
    records: Records,
    loss: object,
    drawn: dict[str, torch.Tensor],
    config: ActorConfig,
    options: dict[str, object],
    aggregate: str = "token-mean",
    *,
    value: bool = True,
    differs: str = "",
) -> None:
    """Adds one loss with its gradient; without its value where only the gradient must agree."""

    def compute(logprobs: torch.Tensor) -> torch.Tensor:
        old, advantages, mask = drawn["old_logprobs"], drawn["advantages"], drawn["mask"]
        return loss(old, logprobs, advantages, mask, aggregate, config)[0]

    outputs = take_gradient(compute, drawn)
    if not value:
        del outputs["value"]
    records.add("losses.policy", drawn, outputs, options, differs=differs)


def add_kl(records: Records) -> None:
    """KL estimates; k3 of small ones, since its clamps differ."""
    logprobs, reference = records.random_tensor(8), records.random_tensor(8)
    records.add_kl(peer.kl_penalty_forward, logprobs, reference)
    far = {"logprobs": [0.0, 0.0], "reference": [8.0, -8.0]}
    terms = peer.kl_penalty_forward(torch.zeros(2), torch.tensor([8.0, -8.0]), "k3")
    why = "k3 clamps x to ±5 in rlx; verl clamps x to ±20 and k3 to ±10"
    records.add("kl.kl_terms", far, {"value": terms}, {"kind": "k3"}, differs=why)


if __name__ == "__main__":
    main()
