"""Runs that are stopped, damaged or killed, and go on: in the end every number is the same."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from patience import ForwardClock

LONGER = {
    "phases.0.steps": 3,
    "phases.1.steps": 4,
    "runner.checkpoint.every": 2,
    "evaluation.problems": 4,
    "estimator": "{name: gae, whiten: true}",
    "critic": "{learning_rate: 1e-3}",
    "credit": "{use_kl_in_reward: true, kl_adaptive: {target: 0.05, horizon: 100000}}",
    "phases.0.fresh_optimizer": "false",
    "optimizer.mini_batches": 2,
}


def longer(home, **sets):
    return {**home.brief, **LONGER, **home.unhurried, **sets}


@pytest.fixture(scope="module")
def unbroken(home):
    return home.submit(sets=longer(home))


def begin(home, **sets):
    return home.submit("-d", "--again", sets=longer(home, **sets))


def kinds(home, run_id):
    return [e.kind for e in home.events(run_id)]


def checkpoints(home, run_id):
    """Complete ones, oldest first; one that is being written has a longer name."""
    return sorted((Path(home.run(run_id).directory) / "checkpoints").glob("step_??????"))


def test_a_stopped_run_has_a_checkpoint_of_its_last_step_and_goes_on(home, unbroken):
    run_id = begin(home)  # its interpreters' seeds of `hash` differ from the unbroken run's
    home.stop(run_id, after=2)
    last = home.run(run_id).step
    assert checkpoints(home, run_id)[-1].name == f"step_{last:06d}"
    assert home.rlx("resume", run_id, "-q").returncode == 0
    assert "resumed" in kinds(home, run_id)
    assert home.differences(unbroken, run_id) == []
    refused = home.rlx("resume", run_id)
    assert refused.returncode == 2
    assert "nothing to resume" in refused.stderr


def test_a_killed_rank_is_started_again_past_a_damaged_checkpoint(home, unbroken):
    run_id = begin(home)
    ranks = home.await_ranks(run_id)
    home.until(lambda: len(checkpoints(home, run_id)) >= 2, "two checkpoints")
    home.freeze(*ranks)  # no newer one is written from here on
    state = checkpoints(home, run_id)[-1] / "state.json"
    state.write_bytes(state.read_bytes()[:-1])
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    home.until(lambda: home.run(run_id).status == "finished", "it to finish")
    assert home.run(run_id).attempt == 2
    told = kinds(home, run_id)
    assert {"attempt_failed", "checkpoint_refused", "resumed"} <= set(told)
    assert home.differences(unbroken, run_id) == []


def make_pipe(path):
    with suppress(FileExistsError):
        os.mkfifo(path)
    return path.is_fifo()


def test_a_run_that_hangs_is_ended_and_goes_on(home, unbroken, tmp_path, monkeypatch):
    clock = ForwardClock(tmp_path)
    for name, value in clock.hand_to(home.environment).items():
        monkeypatch.setitem(home.environment, name, value)
    run_id = begin(home, **{"runner.hang_after": 400})
    home.until(lambda: home.run(run_id).step >= 3, "it to train")
    folder = Path(home.run(run_id).directory)
    pipe = folder / "progress.tmp"  # a rank that opens it waits for a reader
    home.until(lambda: make_pipe(pipe), "a moment in which it is not written")

    def shows_stacks():
        clock.set_forward(10)
        return "in _write" in (folder / "run.log").read_text()

    home.until(shows_stacks, "the stacks in the log")
    pipe.unlink()
    home.until(lambda: home.run(run_id).status == "finished", "it to finish")
    told = [e.message for e in home.events(run_id) if e.kind == "attempt_failed"]
    assert len(told) == 1 and "no progress for 400 s" in told[0]
    assert home.differences(unbroken, run_id) == []


def test_adapted_beta_and_a_critics_values_are_rescored_to_the_bit(home, unbroken):
    told = home.json("rescore", unbroken)
    assert told["same"], [c for c in told["changes"] if c["changed"]]
    part = home.json("rescore", unbroken, "--step", 6)  # begins with what is stored of step 5
    assert (part["steps"], part["same"]) == ([6], True)


def test_what_differs_is_named(home, unbroken):
    short = {**home.brief, "phases.0.steps": 1, "phases.1.steps": 1, "seed": 1}
    other = home.submit(sets=short)
    told = "\n".join(home.differences(unbroken, other))
    for said in ("metric ", "evaluation held_out", "of the rollouts of step 1 differs", "weights"):
        assert said in told


@pytest.mark.timeout(3600)  # four runs and more
def test_kills_at_random_moments(home):
    # Seed 47 kills in the middle: the first run, which is timed, also makes what others find made.
    trial = ("check", home.yaml, "--kills", 2, "--at-once", 2, "--seed", 47)
    done = home.rlx(*trial, sets={**home.mirrored, **LONGER}, seconds=3400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 killed runs have the same numbers as the uninterrupted run" in done.stdout
    assert "killed during" in done.stdout
