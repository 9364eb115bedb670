"""One run that takes a step of every estimator: what it stores, and that it holds together."""

import shutil
from pathlib import Path

import pytest
from rows import each_row

from rlx.discovery import list_installed_plugins

SPEC = Path(__file__).with_name("every_estimator.yaml")


@pytest.fixture(scope="module")
def every(own_home):
    """The finished run, and its stored steps by the name of their phase."""
    home = own_home
    shutil.copy(SPEC, home.folder / "every.yaml")
    run = home.submit("every.yaml")
    with home.registry() as registry:
        phases = {
            registry.results.rollout_body(run.id, step).statistics["phase"]: step
            for step in registry.results.rollout_steps(run.id)
        }
    bodies = {step: trees for step, trees, _ in home.bodies(run)}
    return run, {phase: (step, bodies[step]) for phase, step in phases.items()}


def rows(trees):
    return [row for tree in trees for row in tree["rows"]]


def test_every_estimator_is_there():
    text = SPEC.read_text()
    ours = {f.name for f in list_installed_plugins("estimator") if f.distribution == "rlx"}
    assert {name for name in ours if f"name: {name}" in text} == ours


def test_all_that_is_stored_holds_together(every, own_home):
    run, phases = every
    checked = own_home.check_record(run.id)
    assert len(checked["steps"]) == len(phases) + 1  # gae takes two
    counts = {identity["name"]: identity["checked"] for identity in checked["identities"]}
    # Without an environment nothing was observed.
    missing = {name for name, count in counts.items() if not count}
    assert missing <= {"observations"}, counts


def test_the_literal_recursion_reads_values_between_what_learns(every):
    _, trees = every[1]["literal"]
    gaps = [
        value
        for row in rows(trees)
        if any(row["mask"])
        for t, value in enumerate(row["values"])
        if not row["mask"][t] and any(row["mask"][:t]) and any(row["mask"][t:])
    ]
    assert gaps and all(gaps)


def test_steps_are_worth_what_they_change(every):
    """A step's advantage is what it adds to the value of its state, the last one's the score."""
    _, trees = every[1]["vineppo"]
    for row in rows(trees):
        steps, values = row["step_ids"], row["mc_values"]
        assert steps[0] == 0 and sorted(set(steps)) == list(range(max(steps) + 1))
        start = dict(zip(steps, values, strict=True))
        for step, learns, advantage in zip(steps, row["mask"], row["advantages"], strict=True):
            after = start.get(step + 1, row["scores"]["total_score"])
            assert not learns or advantage == pytest.approx(after - start[step], abs=1e-6)


@each_row("phase", ["paid", "gae", "reinforce_plus_plus"])
def test_kl_in_the_reward_is_paid(every, own_home, phase):
    run, phases = every
    step, trees = phases[phase]
    with own_home.registry() as registry:
        beta = registry.results.rollout_body(run.id, step).statistics["beta"]
    assert beta == 0.001
    paid = [
        (p - r, kl)
        for row in rows(trees)
        for p, r, kl in zip(row["placed"], row["token_rewards"], row["kl"], strict=True)
    ]
    assert any(kl != 0 for _, kl in paid)
    for less, kl in paid:
        assert less == pytest.approx(beta * kl, abs=1e-6)


def test_a_penalty_measures_kl_and_leaves_the_reward(every, own_home):
    run, phases = every
    step, trees = phases["grpo"]
    assert all(row["placed"] == row["token_rewards"] for row in rows(trees))
    assert all(row["reference_logprobs"] is not None for row in rows(trees))
    with own_home.registry() as registry:
        assert step in dict(registry.results.metrics(run.id, ["train/kl_loss"])["train/kl_loss"])
        (told,) = [e.message for e in registry.results.events(run.id) if e.kind == "reference"]
    assert "a frozen copy" in told


def test_a_greedy_answer_for_each_prompt(every):
    _, trees = every[1]["remax"]
    assert [tree["role"] for tree in trees] == ["trained"] * 3 + ["greedy"] * 3
    greedy = {tree["problem_id"]: tree for tree in trees[3:]}
    for tree in trees[:3]:
        (answer,) = [s for s in greedy[tree["problem_id"]]["segments"] if s["author"] == "policy"]
        score = sum(r["raw"] for r in answer["rewards"] if not r["name"].startswith("_"))
        for row in tree["rows"]:
            whole = row["scores"]["greedy_score"]
            assert whole <= score + 0.3 and whole >= score - 0.5


def test_dynamic_sampling_keeps_what_it_filtered(every):
    _, trees = every[1]["gspo"]
    assert {tree["role"] for tree in trees} <= {"trained", "filtered"}
    assert sum(tree["role"] == "trained" for tree in trees) <= 3
    assert len(trees) in (3, 6, 9)
    assert all(not tree["rows"] for tree in trees if tree["role"] == "filtered")
