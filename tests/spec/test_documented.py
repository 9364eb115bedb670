"""What `docs/sources.md` says of algorithms in YAML is YAML that rlx takes."""

import re
from pathlib import Path

import yaml

from rlx.plan import check_file

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sources.md"
BASE = """\
name: documented
model: {kind: tiny}
task: {plugin: countdown}
rollout: {schedule: single}
rewards: {turn: {accuracy: {plugin: countdown.verify, turn: answer}}}
phases: [{name: all, steps: 3}]
"""


def algorithms():
    """Name and YAML snippets of each row of the table of algorithms."""
    table = PAGE.read_text().split("## Algorithms by name")[1].split("## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and "`" in cells[1]:
            yield cells[0], re.findall(r"`([^`]+)`", cells[1])


def overrides(snippets):
    """As `--set` takes them: a section's keys one by one, so that the rest of it stays."""
    for snippet in snippets:
        ((path, value),) = yaml.safe_load(snippet).items()
        keeps = isinstance(value, dict) and value and path in ("credit", "loss", "rollout")
        for key, one in (value if keeps else {"": value}).items():
            whole = f"{path}.{key}" if key else path
            yield f"{whole}={yaml.safe_dump(one, default_flow_style=True, width=1000).strip()}"


def test_an_algorithm_by_name(tmp_path, subtests):
    for name, snippets in algorithms():
        with subtests.test(name=name, snippets=snippets):
            spec = tmp_path / "documented.yaml"
            spec.write_text(BASE)
            told = [text.removesuffix("\n...") for text in overrides(snippets)]
            assert check_file(spec, told)[1].warnings == (), name
