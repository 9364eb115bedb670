"""Runs whose rollouts are sampled several steps ahead, while weights arrive.

Weights that hardly move leave nothing that depends on time but when they arrive: such a run has the
tokens and rewards of the synchronous one, also if it is stopped and resumed.
"""

from pathlib import Path

import pytest
from engines import needs_vllm
from patience import wait_until

pytestmark = [needs_vllm]

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
AHEAD = 3
STEPS = {"answers": range(1, 3), "joint": range(3, 11)}
STILL = {
    "phases.0.steps": len(STEPS["answers"]),
    "phases.1.steps": len(STEPS["joint"]),
    "optimizer.learning_rate": "1e-12",
    "sampler": "{engine: vllm, kv_cache_mb: 32, pool: {servers: 1}}",
    "evaluation.problems": 4,
    "evaluation.every": 4,
    "runner.checkpoint.every": 6,
    "runner.max_attempts": 1,
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
}


@pytest.fixture(scope="module")
def synchronous(own_home):
    done = own_home.rlx("submit", QUICK, "-q", sets=STILL)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def ahead(own_home):
    sets = {**STILL, "rollout.off_policy_steps": AHEAD}
    done = own_home.rlx("submit", QUICK, "-qd", sets=sets)
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.strip()
    own_home.stop(run_id, after=4)
    stopped = own_home.run(run_id).step
    done = own_home.rlx("resume", run_id, "-q")
    assert done.returncode == 0, done.stderr
    wait_until("every process to end", lambda: not own_home.processes())
    return run_id, stopped


def steps_of(home, run_id):
    return {step: trees for step, trees, _ in home.bodies(home.run(run_id))}


def drawn(trees):
    return [[(s["token_ids"], s["rewards"], s["seed"]) for s in t["segments"]] for t in trees]


def test_with_weights_that_stand_still_it_draws_what_the_synchronous_run_draws(
    own_home, synchronous, ahead
):
    expected, found = (steps_of(own_home, run_id) for run_id in (synchronous, ahead[0]))
    assert sorted(found) == sorted(expected) == list(range(1, 11))
    for step, trees in expected.items():
        assert drawn(found[step]) == drawn(trees), step


def test_no_token_is_older_than_it_may_be_and_each_says_how_old_it_is(own_home, ahead):
    run_id, stopped = ahead
    with own_home.registry() as registry:
        found = {name: dict(points) for name, points in registry.results.metrics(run_id).items()}
        begun = {
            step: registry.results.rollout_body(run_id, step).statistics["sampled_after"]
            for step in range(1, 11)
        }
    ages = {}
    for step, trees in steps_of(own_home, run_id).items():
        turns = [s for tree in trees for s in tree["segments"] if s["author"] == "policy"]
        assert all(len(s["sampled_after"]) == len(s["token_ids"]) for s in turns)
        ages[step] = [step - 1 - after for s in turns for after in s["sampled_after"]]
        assert max(ages[step]) <= step - 1 - begun[step] <= AHEAD
        assert found["sampler/staleness"][step] == pytest.approx(sum(ages[step]) / len(ages[step]))
        assert found["sampler/staleness_max"][step] == max(ages[step])
    for steps in STEPS.values():
        assert set(ages[steps[0]]) == {0}, "a phase begins with its own weights"
        for step in steps:
            assert begun[step] == max(steps[0] - 1, step - 1 - AHEAD)
    assert stopped + 1 in begun


def test_a_synchronous_run_has_one_age_for_a_step(own_home, synchronous):
    for trees in steps_of(own_home, synchronous).values():
        assert all(s["sampled_after"] is None for tree in trees for s in tree["segments"])


def test_a_run_that_was_sampled_ahead_keeps_its_identities(own_home, ahead):
    done = own_home.rlx("check", ahead[0])
    assert done.returncode == 0, done.stdout + done.stderr
