"""Whole experiments in the documentation are experiments that rlx takes."""

import re
from pathlib import Path

import pytest
import yaml
from rows import each_row

from rlx.plan import check_file

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
WHOLE = {"name", "model", "task", "rewards", "phases"}
EXPERIMENTS = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for number, text in enumerate(BLOCK.findall(page.read_text()), start=1)
    if yaml.safe_load(text).keys() >= WHOLE
]


def test_there_are_some():
    assert any(param.id.startswith("README") for param in EXPERIMENTS)


@each_row("text", EXPERIMENTS)
def test_an_experiment_validates(text, tmp_path):
    file = tmp_path / "documented.yaml"
    file.write_text(text)
    check_file(file)
