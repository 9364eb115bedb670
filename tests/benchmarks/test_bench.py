"""The command behind `make bench`, and what it has written."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCH = Path(__file__).with_name("bench.py")
PROMISED = {
    *("rlcr_update_short", "rlcr_update_long", "two_turn_generation", "rlcr_step"),
    *("grpo_step_vs_trl", "gae", "gae_gaps", "turn_proportional", "grpo_outcome"),
    *("countdown_score", "validate_cpu_seconds", "start_cpu_seconds"),
}
LITTLE = {
    "runs": 20, "steps": 8, "long_steps": 5001, "long_rows": 1,
    "recorded": 1, "recorded_steps": 8, "rows": 8, "big_rows": 640, "big_tokens": 4,
}  # fmt: skip
"""A registry in which every page of the benchmark exists."""
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


def test_every_page_of_the_large_registry_is_served(tmp_path, monkeypatch):
    """The benchmark of the dashboard makes its registry itself, past what records runs."""
    monkeypatch.syspath_prepend(str(BENCH.parent))
    pages, large = import_module("dashboard_pages"), import_module("large_registry")
    url = large.build(tmp_path / "registry", replace(large.LARGE, **LITTLE))
    with pages.dashboard(url) as served:
        for path in pages.PAGES.values():
            pages.asked(served, path)  # which wants an answer of status 200
