"""Texts that a policy may try to be paid by, reward by reward, and what each of them earns.

Each line of `adversarial/REWARD.jsonl` is one: the sample with its text, the score that it must
have, how it was found, and in `before` what it earned under the rule before.
"""

import json
from importlib import import_module
from pathlib import Path

import pytest
from rows import each_row

from rlx.discovery import list_installed_plugins, load_plugin
from rlx.plugin import Sample
from rlx.testing.promise import build_subject_plugin

ROOT = Path(__file__).parents[2]
CORPORA = Path(__file__).parent / "adversarial"
GUESTS = {
    "consensus": "rlx_example.rewards:Consensus",
    "distinct": "rlx_example.rewards:Distinct",
    "few_errors": "rlx_example.rewards:few_errors",
    "guess.found": "rlx_guess.rewards:score_found_secret",
    "guess.sensible": "rlx_guess.rewards:score_sensible_guess",
}
"""Rewards of the example packages, which need not be installed."""
ELSEWHERE = {"command", "judge", "judge.rank", "python_tests"}
"""Start programs or ask servers: theirs are `hostile_programs` and the texts in test_judge.py."""
SHIPPED = {
    f.name
    for f in list_installed_plugins()
    if (f.kind, f.distribution) == ("reward", "rlx") and f.name not in ELSEWHERE
}


def load_reward(name):
    if name not in GUESTS:
        return load_plugin("reward", name)
    module, _, attribute = GUESTS[name].partition(":")
    return getattr(import_module(module), attribute)


@pytest.fixture(autouse=True)
def example_packages(monkeypatch):
    for name in ("rlx-example", "rlx-guess"):
        monkeypatch.syspath_prepend(str(ROOT / "plugins" / name))


def build_sample(record, id="0"):
    lists = {
        key: tuple(record[key]) for key in ("context", "observations", "history") if key in record
    }
    return Sample(id=id, **{**record, **lists})


def test_every_shipped_reward_has_a_corpus():
    assert {path.stem for path in CORPORA.glob("*.jsonl")} == SHIPPED | set(GUESTS)


@each_row("name", sorted(SHIPPED | set(GUESTS)))
def test_every_find_earns_what_it_should(name):
    lines = (CORPORA / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    corpus = [json.loads(line) for line in lines if line]
    assert corpus
    for case in corpus:
        reward = build_subject_plugin(load_reward(name), case.get("options", {}))
        if "sample" in case:
            verdict = reward.score(build_sample(case["sample"]))
        else:
            verdict = reward.score(
                [build_sample(s, f"{i}") for i, s in enumerate(case["samples"])]
            )[0]
        value = getattr(verdict, "value", verdict)
        assert value == (case["score"] if value is None else pytest.approx(case["score"])), case
