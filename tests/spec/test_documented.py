"""What `docs/sources.md` and the mapping of the designs say in YAML is YAML that rlx takes."""

import re
from pathlib import Path

import yaml

from rlx.plan import check_file

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sources.md"
DESIGNS = ROOT / "experiments" / "sources" / "designs.md"
BASE = """\
name: documented
model: {kind: tiny}
task: {plugin: countdown}
rollout: {schedule: single}
rewards: {turn: {accuracy: {plugin: countdown.verify, turn: answer}}}
phases: [{name: all, steps: 3}]
"""
SECTIONS = (
    "estimator",
    "critic",
    "credit",
    "loss",
    "mask",
    "rollout",
    "rewards",
    "probe",
    "monte_carlo",
)


def algorithms():
    """Name and YAML snippets of each row of the table of algorithms."""
    table = PAGE.read_text().split("## Algorithms by name")[1].split("## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and "`" in cells[1]:
            yield cells[0], re.findall(r"`([^`]+)`", cells[1])


def settings():
    """Every other snippet of the pages that is a mapping of one section."""
    rest = PAGE.read_text().split("## Algorithms by name")[1].partition("## ")[2]
    for snippet in re.findall(r"`([^`]+)`", DESIGNS.read_text() + rest):
        head, colon, _ = snippet.partition(":")
        if colon and head.split(".")[0] in SECTIONS and "NAME" not in snippet:
            yield snippet


def overrides(snippets):
    """As `--set` takes them: a section's keys one by one, so that the rest of it stays."""
    for snippet in snippets:
        ((path, value),) = yaml.safe_load(snippet).items()
        keeps = isinstance(value, dict) and value and path in ("credit", "loss", "rollout")
        for key, one in (value if keeps else {"": value}).items():
            whole = f"{path}.{key}" if key else path
            yield f"{whole}={yaml.safe_dump(one, default_flow_style=True, width=1000).strip()}"


def taken(tmp_path, snippets):
    spec = tmp_path / "documented.yaml"
    spec.write_text(BASE)
    told = [text.removesuffix("\n...") for text in overrides(snippets)]
    return check_file(spec, told)


def test_an_algorithm_by_name(tmp_path, subtests):
    for name, snippets in algorithms():
        with subtests.test(name=name, snippets=snippets):
            read, plugins = taken(tmp_path, snippets)
            assert read.spec.digest
            assert plugins.warnings == (), name


ASKED = ["evaluation.correct: exact", "rewards.turn: {}"]
"""What an experiment with an environment cannot keep of the one that the page starts from."""

NEEDS = {
    "use_kl_in_reward: true": ["estimator: {name: reinforce_plus_plus}"],
    "kl_adaptive": ["credit: {use_kl_in_reward: true}", "estimator: {name: reinforce_plus_plus}"],
    "name: gae": ["critic: {}"],
    "critic: {}": ["estimator: {name: gae}"],
    "name: vineppo": ["monte_carlo: {samples: 4}"],
    "monte_carlo: {samples: 4}": ["estimator: {name: vineppo}"],
    "schedule: environment": ["rewards.global.exact: {plugin: kg.exact_match}", *ASKED],
    "forced_answer": [
        "rollout: {schedule: environment, environment: {plugin: kg}}",
        "rewards.global.exact: {plugin: kg.exact_match}",
        *ASKED,
    ],
    "two_turn": [
        "rollout: {confidence: {template: 'sure?', spans: [confidence]}}",
        "rewards.turn.brier: {plugin: rlcr.brier, turn: confidence, of: accuracy}",
    ],
}


def test_a_setting_by_itself(tmp_path, subtests):
    for snippet in sorted(set(settings())):
        with subtests.test(snippet=snippet):
            more = [extra for part, extras in NEEDS.items() if part in snippet for extra in extras]
            read, _ = taken(tmp_path, [*more, snippet])
            assert read.spec.digest
