"""Runs that go on on other ranks, under another ZeRO stage, in other runs, or in other hands.

One run on one rank has kept its checkpoints; another goes on from the middle of it on two ranks
under ZeRO stage 3, once unbroken and once stopped, and a third goes on from that one.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.checkpoint import pin_checkpoint
from rlx.plan import read_spec
from rlx.spec.reading.diagnostics import InvalidSpec

FIRST = {
    "phases.0.steps": 4,
    "phases.1.steps": 4,
    "runner.checkpoint": "{every: 2, keep: 9}",
    "estimator": "{name: gae, whiten: true}",
    "critic": "{learning_rate: 1e-3}",
    "credit": "{use_kl_in_reward: true, kl_adaptive: {target: 0.05, horizon: 100000}}",
}
TWO = {"runner.ranks": 2, "runner.zero_stage": 3, "phases.1.steps": 8}


def submit(home, *options, **sets):
    sets = {**home.brief, **home.unhurried, **FIRST, **sets}
    return home.submit(*options, sets=sets)


def root(home, run_id):
    return Path(home.run(run_id).directory)


def events(home, run_id):
    return {e.kind: e.message for e in home.events(run_id)}


def series(home, run_id):
    found = home.metrics(run_id)
    return {k: dict(v) for k, v in found.items() if not k.startswith("perf/")}


@pytest.fixture(scope="module")
def first(own_home):
    return submit(own_home)


@pytest.fixture(scope="module")
def second(own_home, first):
    """Goes on from the fourth step of `first`, which ends a phase."""
    return submit(own_home, **TWO, from_checkpoint=f"{first}@4")


def test_two_ranks_take_the_steps_that_one_would_have_taken(own_home, first, second):
    found, expected = series(own_home, second), series(own_home, first)
    assert found.keys() == expected.keys()
    # Later steps may draw other tokens, where two logits are as near as the order of a sum.
    for name, points in expected.items():
        if 5 in points:
            assert found[name].pop(5) == pytest.approx(points[5], rel=1e-4, abs=1e-6), name
    with own_home.registry() as registry:
        rows = [registry.results.rollout_index(run_id, 5) for run_id in (first, second)]
        evaluated = [
            {
                e.step
                for e in registry.results.evaluations(run_id, "held_out")
                if e.label == "before"
            }
            for run_id in (first, second)
        ]
    assert [r.preview for r in rows[0]] == [r.preview for r in rows[1]]
    assert evaluated == [{0}, {4}]
    trained = {name: p for name, p in found.items() if p and not name.startswith("warm_start/")}
    assert all(min(points) >= 4 for points in trained.values())
    told = events(own_home, second)["forked"]
    assert f"continues from {first}@4, written by one rank under ZeRO stage 1" in told


def test_a_run_on_two_ranks_that_is_stopped_goes_on_to_the_same_numbers(own_home, first, second):
    run_id = submit(own_home, "-d", "--again", **TWO, from_checkpoint=f"{first}@4")
    own_home.stop(run_id, after=6)
    assert own_home.rlx("resume", run_id, "-q").returncode == 0
    assert "continues after step" in events(own_home, run_id)["resumed"]
    assert own_home.differences(second, run_id) == []


def test_a_fork_of_a_fork_needs_neither(own_home, second):
    settings = {"runner.zero_stage": 2, "phases.1.steps": 10}
    third = submit(own_home, "-d", **settings, from_checkpoint=f"{second}@latest")
    whole = own_home.run(third).spec["from_checkpoint"]
    moved = root(own_home, second) / "checkpoints"
    moved.rename(moved.with_name("gone"))
    own_home.until(lambda: own_home.run(third).ended, "it to end")
    moved.with_name("gone").rename(moved)
    assert whole == f"{second}@12"
    assert own_home.run(third).status == "finished"
    assert min(series(own_home, third)["rewards/accuracy/mean"]) == 13


def test_an_export_of_the_last_step_is_the_runs_own_model(own_home, second, tmp_path):
    done = own_home.rlx("export", second, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert f"{second} after step 12" in done.stdout
    own = root(own_home, second) / "model"
    assert {p.name for p in own.iterdir()} == {p.name for p in (tmp_path / "model").iterdir()}
    for file in own.iterdir():
        assert file.read_bytes() == (tmp_path / "model" / file.name).read_bytes(), file.name
    AutoTokenizer.from_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_an_earlier_step_is_exported_by_its_number(own_home, first, tmp_path):
    assert own_home.rlx("export", f"{first}@6", tmp_path / "six").returncode == 0
    six, eight = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "six", root(own_home, first) / "model")
    )
    assert six.keys() == eight.keys()
    assert any(not six[name].equal(eight[name]) for name in six)


WRONG = {
    "no such run": ({}, "r-0900@2", "no run 'r-0900'"),
    "no such step": ({}, "{}@3", "there is no checkpoint of step 3; available steps: 2, 4, 6, 8"),
    "nothing left": ({}, "{}@latest", "phases have 8 steps, but {} had already taken 8"),
    "another model": ({"model.layers": 2}, "{}@4", "model.layers is 2, but {} trained"),
    "no critic": (
        {"critic": "null", "estimator": "{name: grpo}", "credit": "{}"},
        "{}@4",
        "the checkpoint of {} has a critic, but the experiment has none",
    ),
    "another precision": ({"runner.dtype": "bfloat16"}, "{}@4", "runner.dtype is 'bfloat16'"),
    "stage 0": ({"runner.zero_stage": 0}, "{}@4", "converts between stages 1, 2 and 3"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_said_at_its_line(own_home, first, what):
    sets, origin, said = WRONG[what]
    said_so = {**own_home.brief, **FIRST, **sets, "from_checkpoint": origin.format(first)}
    read = read_spec(own_home.yaml, [f"{path}={value}" for path, value in said_so.items()])
    with own_home.registry() as registry, pytest.raises(InvalidSpec) as refused:
        pin_checkpoint(registry, read)
    (fault,) = refused.value.diagnostics
    assert said.format(first) in fault.message
    assert fault.position is not None


def test_a_damaged_origin_is_refused_before_anything_is_recorded(own_home, first):
    state = root(own_home, first) / "checkpoints" / "step_000002" / "state.json"
    sound, before = state.read_text(), recorded(own_home)
    state.write_text(sound.replace('"step": 2', '"step": 3'))
    overrides = {**own_home.brief, **FIRST, "from_checkpoint": f"{first}@2"}
    done = own_home.rlx("submit", own_home.yaml, "-q", sets=overrides)
    state.write_text(sound)
    assert done.returncode == 2
    assert "checkpoint step_000002 is damaged: state.json has changed" in done.stderr
    assert recorded(own_home) == before


def recorded(home):
    with home.registry() as registry:
        return [run.id for run in registry.runs()]
