"""GDPO as its authors' trainer computes it: `python gdpo.py SOURCES FILE [SEED]`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from records import Records, run_branch

TRAINER = "trl-GDPO/trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py"
EPS = 1e-4
"""Of standard deviations, in the authors' code."""


def main() -> None:
    """Writes the records."""
    torch.set_default_dtype(torch.float64)
    records = Records("GDPO (arXiv 2601.05242), its fork of TRL", rtol=1e-6, atol=1e-9)
    source = (Path(sys.argv[1]) / TRAINER).read_text(encoding="utf-8")
    for number in range(60):
        prompts, size, names = 2 + number % 3, 2 + number % 4, 2 + number % 2
        rewards = torch.stack([records.draw_scores(prompts * size) for _ in range(names)], dim=1)
        weights = records.random_tensor(names) + 0.5
        trainer = SimpleNamespace(apply_gdpo=True, reward_weights=weights, num_generations=size)
        names_in = {"self": trainer, "rewards_per_func": rewards, "device": "cpu", "torch": torch}
        advantages = run_branch(source, "pre_bn_advantages", names_in)["advantages"]
        groups = [g for g in range(prompts) for _ in range(size)]
        records.add(
            "estimators.gdpo",
            {"named_rewards": rewards, "reward_weights": weights, "group_ids": groups},
            {"advantages": advantages[:, None]},
            {"eps": EPS},
        )
    records.write()


if __name__ == "__main__":
    main()
