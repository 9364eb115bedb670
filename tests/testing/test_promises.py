"""Promises over all plugins that rlx ships, and proof that each promise has teeth."""

import json
import sys
from pathlib import Path
from unittest import SkipTest

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # other processes inherit it
sys.path.insert(0, str(Path(__file__).parents[1] / "reward"))

import bad_plugins as bad
from gyms_installed import LIBRARIES, need_library
from hostile_rewards import Abstains, graded, misbehave

from rlx.discovery import build_plugin, list_installed_plugins, load_plugin
from rlx.plugin import Reward, Sample
from rlx.spec import PluginUse
from rlx.testing import (
    check_environment,
    check_estimator,
    check_mask,
    check_reward,
    check_task,
    environment_checks,
    example_batch,
    list_plugin_checks,
    mask_checks,
    reward_checks,
    task_checks,
)
from rlx.testing.promise import run_checks

ELSEWHERE = {"command", "judge", "judge.rank", "python_tests", "verifiers"}
"""Need a sandbox, a server or an interpreter of their own: tests/system and tests/gyms check their
promises."""

OURS = [
    (f.kind, f.name)
    for f in list_installed_plugins()
    if f.distribution == "rlx" and f.name not in ELSEWHERE
]


def named(checks, name):
    (check,) = [check for check in checks if str(check) == name]
    return check


@pytest.fixture
def options(tmp_path):
    """Of the plugins that have no defaults for them."""
    file = tmp_path / "train.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(40)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        ("task", "dataset"): {"train": {"path": str(file)}, "held_out": 0.3},
        ("task", "reasoning_gym"): {"dataset": "chain_sum"},
        ("reward", "info"): {"key": "return"},
        ("schedule", "two_turn"): {"confidence": {"max_new_tokens": 8}},
        ("schedule", "environment"): {"environment": {"plugin": "kg"}},
        ("schedule", "agent"): {"function": "agent:play"},
        ("schedule", "levels"): {"levels": [{"kind": "answer", "max_new_tokens": 8}]},
        ("task", "mixture"): {"tasks": {"easy": {"plugin": "countdown", "numbers": [2]}}},
    }


def test_every_plugin_that_rlx_ships_keeps_every_promise(options, subtests):
    for kind, name in OURS:
        with subtests.test(kind=kind, name=name):
            if name in LIBRARIES:
                need_library(LIBRARIES[name])
            given = options.get((kind, name))
            plugin = (
                load_plugin(kind, name)
                if given is None
                else build_plugin(PluginUse(plugin=name, **given), kind)
            )
            run_checks(list_plugin_checks(kind), plugin)


def test_every_reward_that_rlx_ships_has_examples_of_several_values(subtests):
    for name in [name for kind, name in OURS if kind == "reward"]:
        with subtests.test(name=name):
            examples = load_plugin("reward", name).examples
            assert any(e.name.startswith("gold") for e in examples)
            assert len({e.value for e in examples}) > 1


def in_place(batch):
    return batch.is_own.logical_and_(batch.turn_ids > 1)


BROKEN = {
    reward_checks: [
        (bad.nameless, "has a docstring", ""),
        (bad.half_an_option, "keeps its options through JSON", ""),
        (bad.breaks_its_word, "matches its examples", ""),
        (bad.by_count, "repeats its verdicts", ""),
        (bad.by_hash, "repeats its verdicts", ""),
        (bad.trusting, "tolerates hostile text", ""),
        (bad.beyond_its_range, "keeps within its value_range", ""),
        (bad.by_position, "ignores the order of samples", ""),
        (bad.spread, "accepts a single sample", ""),
        (bad.local(), "returns a number or abstains", "cannot be sent"),
        (graded, "returns a number or abstains", "needs 'reason' among its options"),
    ],
    task_checks: [
        (bad.Secretive, "returns the same demonstration again", ""),
        (bad.Fickle, "returns the same problem again", ""),
        (bad.Leaky, "keeps train and test disjoint", ""),
        (bad.Odd, "returns complete problems", ""),
    ],
    environment_checks: [
        (bad.Unfinished, "returns a Step", "has no step"),
        (bad.Bare, "returns a Step", "KeyError: 'word'; give it examples"),
        (bad.Boastful, "matches its examples", "'gold' does not end"),
        (bad.Careless, "does not modify states", "changed the state that it received"),
        (bad.Kept, "repeats its steps", "different steps the second time"),
        (bad.Trusting, "tolerates hostile text", "empty text: IndexError"),
        (bad.Selfish, "plays both players", "'both': player 1 never has a turn"),
        (bad.Whispering, "plays both players", "player 1 reads nothing before its first turn"),
    ],
    mask_checks: [
        (lambda b: b.is_own.float(), "returns bool of the batch's shape", ""),
        (lambda b: b.is_own.any(dim=1), "returns bool of the batch's shape", ""),
        (lambda b: b.is_token, "selects only a row's own tokens", ""),
        (in_place, "does not modify the batch", ""),
        (lambda b: b.is_own & (b.token_ids.roll(1, 0) > 50), "ignores the order of rows", ""),
        (lambda b: b.is_own & (b.turn_ids.shape[1] < 20), "ignores padding", ""),
    ],
}


@pytest.mark.parametrize("checks", BROKEN, ids=lambda checks: checks.__name__)
def test_a_bad_plugin_breaks_the_right_promise(checks, subtests):
    for plugin, promise, says in BROKEN[checks]:
        with (
            subtests.test(plugin=plugin, promise=promise),
            pytest.raises(AssertionError, match=says or r"\w"),
        ):
            named(checks(), promise)(plugin)


def test_good_plugins_break_none():
    for good in (bad.fine, bad.fine(limit=9), Abstains(), graded(reason="so")):
        check_reward(good)
    for good in (bad.Sums, bad.Mute):
        check_task(good)
    for good in (bad.Echo, bad.Echo(), bad.InTurn):
        check_environment(good)
    check_environment(bad.Bare, [{"word": "?"}, {"word": "42"}])
    check_mask(lambda batch: batch.is_own & (batch.turn_ids > 1))


def test_what_would_end_a_process_is_a_broken_promise():
    sample = Sample(id="0", problem={}, turn="answer", number=1, response="bad")
    check = named(reward_checks([sample]), "returns a number or abstains")
    with pytest.raises(AssertionError, match="signal 11"):
        check(misbehave(how="segfault"))


def test_without_examples_and_with_one_sample_some_do_not_apply():
    for promise in (
        "matches its examples",
        "ignores the order of samples",
        "accepts a single sample",
    ):
        with pytest.raises(SkipTest):
            named(reward_checks(), promise)(bad.fine)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import vllm\n", "imports vllm"),
        ("import os\nos._exit(7)\n", "exit code 7"),
        ("raise OSError('no')\n", "OSError: no"),
    ],
)
def test_importing_is_watched(source, says, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("")
    (tmp_path / "weighty.py").write_text(source + "class Weighty: ...")
    monkeypatch.syspath_prepend(tmp_path)
    weighty = type("Weighty", (Reward,), {"__module__": "weighty", "__qualname__": "Weighty"})
    with pytest.raises(AssertionError, match=says):
        named(reward_checks(), "imports no heavy package")(weighty)


def test_example_batches_hold_every_case_that_a_promise_speaks_of(subtests):
    for seed in range(5):
        with subtests.test(seed=seed):
            batch = example_batch(seed)
            assert {row.kind for row in batch.rows} == {"answer", "confidence"}
            assert {len(row.turns) for row in batch.rows} == {1, 2}
            assert (~batch.is_token).any(), "no row is padded"
            found = sum(span.any(dim=1).int() for span in batch.spans.values())
            assert (found == 0).any() and (found > 0).any()
            assert batch.is_end.any() and not batch.is_end.any(dim=1).all()


def test_an_estimator_that_needs_more_is_passed_over_with_the_reason():
    for check in list_plugin_checks("estimator")[3:]:
        with pytest.raises(SkipTest, match="it needs environment, which no example here has"):
            check(bad.Critical)
    check_estimator(bad.Critical)


def test_an_implementation_must_be_there():
    with pytest.raises(AssertionError, match="'nowhere:at_all' cannot be imported"):
        check_mask(bad.Nowhere)
