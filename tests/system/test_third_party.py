"""Distributions of other people, installed from their files into a folder and used by experiments:
two that work, and three that harm nobody but the experiments that name them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_homes import QUIET, TINY

from rlx_registry import Registry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "plugins" / "rlx-example"
GUESS = ROOT / "plugins" / "rlx-guess"
RLCR = ROOT / "experiments" / "rlcr.yaml"

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "rlx-{name}"
version = "0.3"

[project.entry-points."rlx.rewards"]
"{plugin}" = "rlx_{name}:{attribute}"
"""
REWARD = '''
from rlx.plugin import reward

@reward(api={api})
def score(sample):
    """Scores."""
    return 1.0
'''
OTHERS = {
    "broken": ("wordy", "score", "import nltk_is_not_here\n" + REWARD.format(api=1)),
    "new": ("modern", "score", REWARD.format(api=2)),
    "rival": ("countdown", "score", REWARD.format(api=1)),
}
USED = {
    "rewards.turn.variety": "{plugin: distinct, turn: answer, weight: 0.5}",
    "rewards.turn.agreement": "{plugin: consensus, turn: confidence, weight: 0.5}",
    "estimator": "{name: leave_one_out, scale: 0.5}",
    "mask": "{strategy: one_span, span: answer}",
}
SMALL = {
    **TINY,
    **QUIET,
    "phases": "[{name: only, steps: 2}]",
    "rollout.num_generations_answer": 4,
    "rollout.num_generations_confidence": 3,
    "evaluation.problems": 6,
}


@pytest.fixture(scope="module")
def installed_into(tmp_path_factory):
    """The two of ours and three others, built and installed by pip from their files alone."""
    base = tmp_path_factory.mktemp("third")
    folders = [EXAMPLE, GUESS]
    for name, (plugin, attribute, source) in OTHERS.items():
        folder = base / name
        package = folder / f"rlx_{name}"
        package.mkdir(parents=True)
        text = PYPROJECT.format(name=name, plugin=plugin, attribute=attribute)
        (folder / "pyproject.toml").write_text(text)
        (package / "__init__.py").write_text(source)
        folders.append(folder)
    target = base / "site"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", target)
    pip = [sys.executable, "-m", "pip", "install", *options, *folders]
    done = subprocess.run(list(map(str, pip)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def rlx(installed_into, own):
    """The command line, beside those distributions."""
    own.environment["PYTHONPATH"] = str(installed_into)
    return own.rlx


# Rewards, an estimator and a mask ----------------------------------------------------------------


def test_all_are_listed_each_with_its_state(rlx):
    done = rlx("plugins", "--json")
    assert done.returncode == 0
    rows = {(r["name"], r["from"]): r for r in json.loads(done.stdout)}
    for name in ("distinct", "consensus", "few_errors", "leave_one_out", "one_span"):
        assert rows[name, "rlx-example 0.1.0"]["state"] == "ok"
    broken = rows["wordy", "rlx-broken 0.3"]["state"]
    assert broken == "broken: ModuleNotFoundError: No module named 'nltk_is_not_here'"
    assert "needs rlx plugin API 2" in rows["modern", "rlx-new 0.3"]["state"]
    assert rows["countdown", "rlx-rival 0.3"]["state"] == "clash: say rlx-rival:countdown"


@pytest.mark.parametrize("folder", [EXAMPLE, GUESS], ids=lambda path: path.name)
def test_its_own_tests_pass(folder, installed_into, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed_into)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_a_run_uses_its_rewards_estimator_and_mask(rlx, tmp_path):
    valid = rlx("validate", RLCR, sets=USED)
    assert valid.returncode == 0, valid.stderr
    done = rlx("submit", RLCR, sets={**SMALL, **USED})
    assert done.returncode == 0, done.stderr
    with Registry.open(f"sqlite:///{tmp_path}/home/registry.db", read_only=True) as registry:
        (run,) = registry.runs()
        series = registry.results.metrics(run.id)
    theirs = {p["name"]: p for p in run.plugins if p["distribution"] == "rlx-example"}
    assert set(theirs) == {"distinct", "consensus", "leave_one_out", "one_span"}
    assert {p["version"] for p in theirs.values()} == {"0.1.0"}
    assert theirs["distinct"]["entry_point"] == "rlx_example.rewards:Distinct"
    for name in ("variety", "agreement"):
        assert [step for step, _ in series[f"rewards/{name}/mean"]] == [1, 2]
    answers = rlx("samples", run.id, "--step", "1", "-n", "500", "--json")
    samples = [s for s in json.loads(answers.stdout) if s["turn"] == "answer"]
    by_tree = {}
    for sample in samples:
        by_tree.setdefault(sample["tree"], []).append(sample["rewards"]["variety"])
    assert len(by_tree) == 4
    for verdicts in by_tree.values():
        # The sum over a prompt is its number of distinct answers.
        total = sum(verdicts)
        assert total == pytest.approx(round(total))


# A game with a task, an environment and rewards ---------------------------------------------------

GAME = {
    **{name: value for name, value in SMALL.items() if name.startswith("model.")},
    "model.warm_start.steps": 60,
    "model.warm_start.batch_size": 16,
    "phases.0.steps": 3,
    "rollout.prompts_per_step": 4,
    "rollout.num_generations": 4,
    "evaluation.problems": 6,
    "tracking.mlflow": "null",
    "rewards.turn.tidy": "{plugin: few_errors, key: wasted, turn: '*', weight: 0.1}",
}


def test_a_game_is_played_to_its_end(rlx, tmp_path):
    done = rlx("submit", GUESS / "guess.yaml", "-q", sets=GAME)
    assert done.returncode == 0, done.stderr
    with Registry.open(f"sqlite:///{tmp_path}/home/registry.db", read_only=True) as registry:
        run = registry.run(done.stdout.strip())
        series = registry.results.metrics(run.id)
        suites = {(e.suite, e.step) for e in registry.results.evaluations(run.id)}
    theirs = {(p["kind"], p["name"]) for p in run.plugins if p["distribution"] == "rlx-guess"}
    assert theirs == {
        ("task", "guess"),
        ("environment", "guess"),
        ("reward", "guess.found"),
        ("reward", "guess.sensible"),
    }
    assert suites == {(s, n) for s in ("held_out", "held_out.greedy") for n in (0, 3)}
    for name in ("found", "sensible", "tidy"):
        assert [step for step, _ in series[f"rewards/{name}/mean"]] == [1, 2, 3]
    assert max(value for _, value in series["environment/turns_max"]) == 3
    assert 0 < dict(series["environment/token_share"])[1] < 1
    checked = json.loads(rlx("check", run.id, "--json").stdout)
    assert checked["holds"] and not checked["unchecked"]
    counts = {identity["name"]: identity["checked"] for identity in checked["identities"]}
    assert counts["masks"] and counts["scores"]


# The three others --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        ("wordy", "from rlx-broken 0.3 (entry point 'rlx_broken:score')"),
        ("modern", "error: reward plugin 'modern' needs rlx plugin API 2; this is rlx"),
        ("countdown", "choose one: 'rlx:countdown' or 'rlx-rival:countdown'"),
    ],
)
def test_each_stops_the_experiments_that_name_it(plugin, says, rlx, tmp_path):
    sets = {"rewards.turn.guest": f"{{plugin: {plugin}, turn: answer}}"}
    for verb in ("validate", "submit"):
        done = rlx(verb, RLCR, sets=sets)
        assert done.returncode == 3
        assert says in done.stderr
    assert not (tmp_path / "home" / "registry.db").exists(), "a refused experiment was recorded"


def test_saying_which_settles_a_clash(rlx):
    sets = {"rewards.turn.guest": "{plugin: rlx-rival:countdown, turn: answer}"}
    assert rlx("validate", RLCR, sets=sets).returncode == 0
