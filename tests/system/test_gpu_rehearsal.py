"""What is asked first of a GPU, rehearsed on the CPU with the real weights."""

import json
import subprocess
import sys
from pathlib import Path

from real_models import find_real_weights

CHECK = Path(__file__).parents[1] / "gpu" / "check.py"


def test_what_is_asked_first_of_a_gpu_runs_on_a_cpu(tmp_path):
    find_real_weights()
    command = [sys.executable, CHECK, "--device", "cpu", "--only", "smollm2"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "found.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert len(parts) == 5
    assert not any("skipped" in part for part in parts.values())
    for name in ("smollm2_grpo", "smollm2_rlcr"):
        figures = parts[name]["figures"]
        assert figures["planned_gib"]["update"] > 0
        assert figures["step 1"]["sampler/mismatch_ratio_max"] < 1.001
