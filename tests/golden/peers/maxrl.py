"""MaxRL's advantage as its authors compute it: `python maxrl.py SOURCES FILE [SEED]`."""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from records import Records, hide, run_function

FUNCTION = "compute_maxrl_outcome_advantage"


def main() -> None:
    """Writes the records."""
    torch.set_default_dtype(torch.float64)
    records = Records("MaxRL (arXiv 2602.02710), its fork of verl", rtol=1e-5, atol=1e-6)
    source = (Path(sys.argv[1]) / "verl/trainer/ppo/core_algos.py").read_text(encoding="utf-8")
    compute = run_function(source, FUNCTION, {"torch": torch, "defaultdict": defaultdict, "np": np})
    for number in range(60):
        size = 2 + number % 5
        groups = np.array([g for g in "abc" for _ in range(size)])
        scores, mask = records.draw_scores(len(groups)), records.draw_mask(len(groups), 3)
        rewards = mask * 0
        rewards[:, 0] = scores
        advantages, _ = compute(rewards, mask, groups)
        given = records.give_scores(scores, mask, groups)
        records.add("estimators.maxrl", given, {"advantages": hide(advantages, mask)})
    records.write()


if __name__ == "__main__":
    main()
