"""A little step through all parts, on two ranks, and the tables that are made of it."""

import subprocess
import sys
from pathlib import Path

SCALE = Path(__file__).with_name("scale.py")


def test_a_little_step_on_one_rank_and_on_two(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- step -->\nold\n<!-- /step -->\nafter\n")
    sizes = ["--rollouts=32", "--tokens=240", "--ranks=1,2", f"--page={page}"]
    subprocess.run([sys.executable, SCALE, *sizes], check=True, cwd=tmp_path)
    text = page.read_text()
    assert text.startswith("before\n<!-- step -->\n2 prompts, 4 answers to each")
    assert text.endswith("\n<!-- /step -->\nafter\n")
    assert "old" not in text
    # 32 paths share 8 answers: prompts of 100, answers of 40, questions of 20, confidences of 80
    assert "32 rollouts of 240 tokens, 40 rows" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    for part in ("scoring", "gathering", "rows", "credit", "table", "Parquet file", "SQLite"):
        assert [line.startswith(f"| {part} |") for line in lines].count(True) == 2, part
