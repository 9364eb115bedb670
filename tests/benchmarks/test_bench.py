"""The command behind `make bench`, and what it has written."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCH = Path(__file__).with_name("bench.py")
PROMISED = {
    *("rlcr_update_short", "rlcr_update_long", "two_turn_generation", "rlcr_step"),
    *("grpo_step_vs_trl", "gae", "gae_gaps", "turn_proportional", "grpo_outcome"),
    *("countdown_score", "validate_cpu_seconds", "start_cpu_seconds"),
}
KEYS = {"benchmark", "name", "ratio", "low", "high", "baseline", "unit", "machine"}


def test_every_promised_name_can_be_picked_and_no_other():
    done = subprocess.run(
        [sys.executable, BENCH],
        env={**os.environ, "BENCH": "gae,speed"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    told, _, names = done.stderr.partition("; there are ")
    assert told == "BENCH: no speed"
    assert set(names.strip().split(", ")) >= PROMISED


def test_every_figure_is_whole_and_on_the_page():
    figures = json.loads((ROOT / "docs" / "bench.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for figure in figures:
        assert set(figure) >= KEYS
        assert figure["low"] <= figure["ratio"] <= figure["high"]
        assert f"| `{figure['name']}` |" in page
    names = [figure["name"] for figure in figures]
    assert len(set(names)) == len(names)
    assert set(names) >= PROMISED
