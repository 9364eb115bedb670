"""A run that is paused goes on as if nothing had been; one whose supervisor is killed is lost."""

import os
import signal
from pathlib import Path

import pytest
from patience import ForwardClock

PATIENCE = 400  # more than a crowded machine needs for a step


def events(home, run_id):
    with home.registry() as registry:
        return [event.kind for event in registry.results.events(run_id)]


def shown(home, run_id):
    """The run's status, as every reader has it."""
    with home.registry() as registry:
        (listed,) = [run.id for run in registry.runs(statuses=["lost"])] or [None]
        counted = registry.queries.statuses().get("lost", 0)
        (row,) = [row for row in registry.queries.run_rows() if row.id == run_id]
    return (home.json("status", run_id)["status"], row.effective_status, listed, counted)


@pytest.fixture(scope="module")
def clock(own_home, tmp_path_factory):
    clock = ForwardClock(tmp_path_factory.mktemp("clock"))
    own_home.environment |= clock.hand_to(own_home.environment)
    return clock


@pytest.fixture(scope="module")
def run_id(own_home, clock):
    sets = {**own_home.long, "runner.hang_after": PATIENCE}
    run_id = own_home.submit("-d", sets=sets)
    own_home.until(lambda: own_home.run(run_id).step > 1, "it to train")
    return run_id


def goes_on(home, run_id):
    before = home.run(run_id).step
    home.until(lambda: home.run(run_id).step > before + 1, "it to go on")
    assert home.run(run_id).attempt == 1
    assert "attempt_failed" not in events(home, run_id)


def test_ranks_that_are_stopped_are_waited_for(own_home, clock, run_id):
    ranks = own_home.ranks(run_id)
    own_home.freeze(*ranks)
    until = clock.seconds + 1.25 * PATIENCE
    while clock.seconds < until:
        clock.set_forward(10)
        seen = own_home.run(run_id).heartbeat
        own_home.until(lambda seen=seen: own_home.run(run_id).heartbeat > seen, "a heartbeat")
    assert events(own_home, run_id)[-1] == "paused"
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    own_home.until(lambda: "continued" in events(own_home, run_id), "the supervisor to see it")
    goes_on(own_home, run_id)


def test_a_run_that_is_stopped_with_its_supervisor_goes_on(own_home, clock, run_id):
    family = [own_home.run(run_id).pid, *own_home.ranks(run_id)]
    own_home.freeze(*family)
    clock.set_forward(1.25 * PATIENCE)
    assert shown(own_home, run_id) == ("running", "running", None, 0)
    for pid in family:
        os.kill(pid, signal.SIGCONT)
    goes_on(own_home, run_id)


def test_a_dead_supervisor_is_seen_at_once_and_the_run_goes_on(own_home, run_id):
    supervisor = own_home.run(run_id).pid
    (rank,) = own_home.ranks(run_id)
    variables = Path(f"/proc/{rank}/environ").read_text().split("\0")
    (temporary,) = [Path(v.partition("=")[2]) for v in variables if v.startswith("TMPDIR=")]
    assert temporary.is_dir()
    os.kill(supervisor, signal.SIGKILL)
    own_home.until(lambda: supervisor not in own_home.running(), "the supervisor to end")
    assert shown(own_home, run_id) == ("lost", "lost", run_id, 1)
    own_home.until(lambda: not temporary.exists(), "the rank to remove its files")
    assert own_home.rlx("resume", run_id, "-dq").returncode == 0
    own_home.until(lambda: own_home.run(run_id).attempt == 2, "it to go on")
    assert shown(own_home, run_id) == ("running", "running", None, 0)
    own_home.until(lambda: own_home.rlx("stop", run_id).returncode == 0, "it to be told")
    own_home.until(lambda: not own_home.processes(), "every process to end")
    assert own_home.run(run_id).status == "stopped"
