"""Runs whose rollouts are those of a program, beside the same game as an environment."""

import os
import shutil
import signal
from pathlib import Path

import guests
import pytest

from rlx.launch import find_run_differences

GUESS = guests.ROOT / "plugins" / "rlx-guess"
SMALL = {
    "model.warm_start.steps": 60,
    "model.hidden_size": 32,
    "rollout.prompts_per_step": 4,
    "rollout.num_generations": 4,
    "phases.0.steps": 4,
    "runner.checkpoint.every": 1,
    "evaluation.problems": 8,
}


@pytest.fixture(scope="module")
def home(own_home, tmp_path_factory):
    paths = guests.importable("rlx-guess", tmp_path_factory.mktemp("guess"))
    paths = [*paths, own_home.environment["PYTHONPATH"]]
    own_home.environment["PYTHONPATH"] = os.pathsep.join(paths)
    for name in ("agent.yaml", "agent.py", "guess.yaml"):
        shutil.copy(GUESS / name, own_home.folder / name)
    return own_home


def submit(home, spec, *options, **sets):
    done = home.rlx("submit", spec, "-q", *options, sets={**SMALL, **sets})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.fixture(scope="module")
def unbroken(home):
    return submit(home, "agent.yaml")


def test_the_agent_learns_what_the_environment_teaches(home, unbroken):
    """Every loss, gradient, reward and accuracy, to the last bit, at the same seeds."""
    native = submit(home, "guess.yaml")
    with home.registry() as registry:
        mine, theirs = (
            {
                name: points
                for name, points in registry.results.metrics(run).items()
                if name.startswith(("train/", "eval/", "score/", "rollout/turns", "sampler/"))
                and not name.endswith(("_turn", "_guess", "_unclear", "_std"))
            }
            for run in (unbroken, native)
        )
    assert mine == theirs
    assert len(mine["train/loss"]) == 4
    assert any(mine["train/grad_norm"])


def test_a_run_that_is_killed_among_sessions_goes_on(home, unbroken):
    run = submit(home, "agent.yaml", "-d", "--again")
    ranks = home.await_ranks(run)
    home.until(lambda: home.run(run).step >= 1, "it to train")
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    home.until(lambda: home.run(run).status == "finished", "it to finish")
    assert home.run(run).attempt == 2
    with home.registry() as registry:
        assert list(find_run_differences(registry, unbroken, run)) == []
    home.until(lambda: not home.processes(), "every process to end")
    checked = home.rlx("check", run)
    assert checked.returncode == 0, checked.stdout
    assert "all identities hold" in checked.stdout


def test_a_plan_runs_the_program(home):
    done = home.rlx("plan", "agent.yaml", sets=SMALL)
    assert done.returncode == 0, done.stderr
    assert "groups with advantages: play" in done.stdout
    broken = Path(home.folder / "agent.py").read_text().replace("def play(", "def plan(")
    (home.folder / "broken.py").write_text(broken)
    other = "{rollout.schedule: agent, rollout.function: broken.py:play}"
    refused = home.rlx("plan", "agent.yaml", sets={**SMALL, "phases.0.set": other})
    assert refused.returncode != 0
    assert "rollout.function" in refused.stderr and "has no attribute 'play'" in refused.stderr
