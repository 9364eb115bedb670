"""A run through every way to learn from rollouts with an environment, on one rank and on two."""

import json
import shutil
from pathlib import Path

import pytest

SPEC = Path(__file__).with_name("many_turns.yaml")
QUIET = {"tracking.mlflow": "null"}
UNMASKED = ("unmasked", "turns unmasked", "literal")


class Done:
    """A finished run, and its stored steps by the name of their phase."""

    def __init__(self, home, run_id):
        self.run = home.run(run_id)
        with home.registry() as registry:
            self.evaluations = registry.results.evaluations(run_id)
            steps = registry.results.rollout_steps(run_id)
            names = [registry.results.rollout_body(run_id, s).statistics["phase"] for s in steps]
        bodies = {step: trees for step, trees, _ in home.bodies(self.run)}
        self.phases = {name: bodies[step] for name, step in zip(names, steps, strict=True)}
        self.first = bodies[1]


@pytest.fixture(scope="module")
def home(own_home):
    own_home.add_plugins("rlx-guess")
    shutil.copy(SPEC, own_home.folder / "many.yaml")
    return own_home


def finished(home, **sets):
    done = home.rlx("submit", "many.yaml", "--again", sets={**QUIET, **sets})
    assert done.returncode == 0, done.stderr
    return Done(home, home.json("status", "latest")["run"])


@pytest.fixture(scope="module")
def alone(home):
    return finished(home)


@pytest.fixture(scope="module")
def shared(home, alone):
    first = "[{name: turn by turn, steps: 1, set: {loss.old_logprobs: behaviour}}]"
    return finished(home, **{"runner.ranks": 2, "phases": first, "critic": "null"})


def observed(tree):
    """For every token of each row that an environment wrote: whether it learns, and how."""
    for row in tree["rows"]:
        path, index = [], row["segment"]
        while index >= 0:
            path.append(tree["segments"][index])
            index = path[-1]["parent"]
        authors = [s["author"] for s in reversed(path) for _ in s["token_ids"]][row["start"] :]
        for place, author in enumerate(authors):
            if author == "environment":
                yield row["mask"][place], row["weights"][place], row["advantages"][place]


def test_all_that_is_stored_holds_together_and_is_rescored_to_the_bit(home, alone, shared):
    home.check_record(shared.run.id)
    identities = home.check_record(alone.run.id)["identities"]
    assert all(identity["checked"] for identity in identities)


def test_two_ranks_sample_and_score_the_same_trees(alone, shared):
    kept = ("parent", "author", "kind", "token_ids", "text", "info", "seed", "finish_reason")
    for one, other in zip(alone.first, shared.first, strict=True):
        assert one["problem_id"] == other["problem_id"]
        for a, b in zip(one["segments"], other["segments"], strict=True):
            assert [a[k] for k in kept] == [b[k] for k in kept]
            assert [r["raw"] for r in a["rewards"] or ()] == [r["raw"] for r in b["rewards"] or ()]
        for a, b in zip(one["rows"], other["rows"], strict=True):
            assert a["scores"]["total_score"] == b["scores"]["total_score"]
            assert a["advantages"] == pytest.approx(b["advantages"], abs=1e-6)


@pytest.mark.parametrize("phase", ["turn by turn", "outcome", "paid", *UNMASKED])
def test_observations_learn_where_the_yaml_says_so_and_nowhere_else(alone, phase):
    tokens = [token for tree in alone.phases[phase] for token in observed(tree)]
    assert tokens
    if phase in UNMASKED:
        assert all(mask and weight for mask, weight, _ in tokens)
    else:
        assert not any(value for token in tokens for value in token)


def test_a_phase_may_leave_the_environment_and_come_back(alone):
    kinds = {
        phase: {s["kind"] for tree in trees for s in tree["segments"] if s["author"] == "policy"}
        for phase, trees in alone.phases.items()
    }
    assert kinds["answers alone"] == {"answer"}
    assert kinds["and back"] <= {"guess", "unclear"}


def test_held_out_sets_are_answered_in_every_way(alone):
    suites = ("held_out", "held_out.greedy", "large", "large.greedy")
    last = alone.run.steps_total
    assert [(e.suite, e.step) for e in alone.evaluations] == [
        (suite, step) for step in (0, last) for suite in suites
    ]
    problems = {e.suite: json.dumps(e.payload["problem_ids"]) for e in alone.evaluations}
    assert problems["held_out"] == problems["held_out.greedy"] != problems["large"]
    assert all(e.n == 10 for e in alone.evaluations)
    assert all(e.metrics["environment"]["turns"] >= 1 for e in alone.evaluations)
