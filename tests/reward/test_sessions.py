"""Live sessions in worker processes: what is called, what a loss costs, and that all are closed."""

import os
import signal
from collections import Counter

import psutil
import pytest
from live_worlds import LiveWorld, World
from patience import wait_until
from rows import each_row

from rlx.plugin import Action
from rlx.reward import RewardPool, SessionHost
from rlx.rollout import HostFault, LocalHost
from rlx.spec import EnvironmentLimits

NAMES = "abcd"
LOST = "SessionLostError: its session is lost"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "calls"


def limits(call=60.0, episode=600.0, sessions=4):
    return EnvironmentLimits(call, episode, None, sessions, "drop_sample")


def hosted(pool, log, world=World, **given):
    return SessionHost(world(log=str(log)), pool, limits(**given))


def begun(host, names=NAMES):
    return host.reset([({"name": name}, ord(name[0])) for name in names])


def stepped(host, states, texts, number=1):
    pairs = zip(states, texts, strict=True)
    return host.step([(state, Action(text=text, number=number)) for state, text in pairs])


def played(host, turns=4):
    """Observations of every turn."""
    states, seen = begun(host), []
    for number in range(1, turns + 1):
        steps = stepped(host, states, [f"t{number}"] * len(states), number)
        states = [step.state for step in steps]
        seen.append([step.observation for step in steps])
    host.release(states)
    return seen


def calls(log):
    return Counter(line.split()[0] for line in log.read_text().splitlines())


def finish(host):
    """Waits until nothing is called any more: workers take calls in order."""
    host.release([s for s in begun(host) if not isinstance(s, HostFault)])
    begun(host)


@each_row("world", [World, LiveWorld])
def test_an_episode_of_n_turns_makes_n_calls_and_is_opened_and_closed_once(pool, log, world):
    log.unlink(missing_ok=True)  # of another row
    here = played(LocalHost(world(log=str(log))))
    assert calls(log) == {"open": len(NAMES), "play": len(NAMES) * 4, "close": len(NAMES)}
    log.unlink()
    assert played(hosted(pool, log, world)) == here
    host = hosted(pool, log, world)
    finish(host)
    found = calls(log)
    assert found["play"] == len(NAMES) * 4
    assert found["open"] - 2 * len(NAMES) == len(NAMES)
    assert found["close"] >= 2 * len(NAMES)


def test_the_last_turn_closes_a_session(pool, log):
    (step,) = stepped(hosted(pool, log), begun(hosted(pool, log), "a"), ["end"])
    assert step.done
    assert log.read_text().splitlines()[-1] == "close a"


@each_row("how", ["exit", "kill"])
def test_a_worker_that_is_lost_once_is_replayed_to_the_same_end(pool, log, how):
    log.unlink(missing_ok=True)  # of another row
    expected = played(LocalHost(World()))
    host = hosted(pool, log)
    steps = stepped(host, begun(host), ["t1"] * 4)
    mark = log.with_name(how)
    texts = [f"{how} until {mark}", "t2", "t2", "t2"]
    steps = stepped(host, [s.state for s in steps], texts, 2)
    assert [s.observation for s in steps] == expected[1]
    assert mark.exists()
    # The two sessions of its worker were opened again, and no other.
    assert calls(log)["open"] == 4 + 2


@each_row(
    "text, reason",
    [
        ("raise", "ZeroDivisionError: division by zero"),
        ("exit", "process died (exit code 3)"),
        ("hang", "deadline of 1 s passed"),
    ],
)
def test_a_call_that_fails_costs_its_own_rollout(pool, log, text, reason):
    expected = played(LocalHost(World()))
    for world in (World, LiveWorld):
        host = hosted(pool, log, world, call=1.0 if text == "hang" else 60.0)
        states = [s.state for s in stepped(host, begun(host), ["t1"] * 4)]
        bad, *good = stepped(host, states, [text, "t2", "t2", "t2"], 2)
        assert isinstance(bad, HostFault) and reason in bad.reason
        assert [s.observation for s in good] == expected[1][1:]
        host.release([s.state for s in good])


def test_a_world_that_is_not_replayable_loses_the_rollout_whose_worker_is_gone(pool, log):
    expected = played(LocalHost(World()))
    host = hosted(pool, log, LiveWorld)
    steps = stepped(host, begun(host), ["t1"] * 4)
    assert len({step.info["process"] for step in steps}) == 4
    worker = psutil.Process(steps[0].info["process"])
    worker.kill()
    wait_until("the worker has ended", lambda: worker.status() == psutil.STATUS_ZOMBIE)
    lost, *good = stepped(host, [s.state for s in steps], ["t2"] * 4, 2)
    assert lost.reason.startswith(LOST)
    assert [s.observation for s in good] == expected[1][1:]


def test_a_turn_from_an_earlier_moment_is_a_branch_that_is_replayed(pool, log):
    host = hosted(pool, log)
    (first,) = stepped(host, begun(host, "a"), ["t1"])
    (second,) = stepped(host, [first.state], ["t2"], 2)
    (again,) = stepped(host, [first.state], ["t2"], 2)
    (third, other) = stepped(host, [second.state, again.state], ["t3"] * 2, 3)
    assert second.observation == again.observation
    assert third.observation == other.observation
    assert calls(log) == {"open": 2, "play": 6}
    live = hosted(pool, log, LiveWorld)
    (first,) = stepped(live, begun(live, "a"), ["t1"])
    stepped(live, [first.state], ["t2"], 2)
    (refused,) = stepped(live, [first.state], ["t2"], 2)
    assert refused.reason.startswith(LOST)


def test_one_that_cannot_be_opened_costs_itself(pool, log):
    fault, state = begun(hosted(pool, log), ("locked", "a"))
    assert fault.reason.endswith("OSError: no such world")
    assert state.problem == {"name": "a"}


def test_the_calls_of_an_episode_have_a_limit_of_their_own(pool, log):
    host = hosted(pool, log, LiveWorld, episode=0.5)
    (step,) = stepped(host, begun(host, "a"), ["t1"])
    (fault,) = stepped(host, [step.state], ["hang"], 2)
    assert fault == HostFault("deadline of 0.5 s for an episode passed")


def test_sessions_beyond_the_limit_wait_for_those_before(pool, log):
    host = hosted(pool, log, LiveWorld, sessions=2)
    for number, name in enumerate(NAMES):
        host.submit(number, "reset", ({"name": name}, 0))
    opened = {}
    while len(opened) < 2:
        opened |= dict(host.collect(None))
    assert host.collect(0) == [] and calls(log) == {"open": 2}
    host.release([opened.pop(0)])
    opened |= dict(host.collect(None))
    assert sorted(opened) == [1, 2]
    host.submit(1, "step", (opened.pop(1), Action(text="end")))
    answers = {}
    while len(answers) < 2:
        answers |= dict(host.collect(None))
    assert answers[1].done and sorted(answers) == [1, 3]


def test_a_keeper_that_is_killed_loses_no_call(pool, log):
    expected = played(LocalHost(World()))
    host = hosted(pool, log)
    steps = stepped(host, begun(host), ["t1"] * 4)
    keeper = psutil.Process(steps[0].info["process"]).parent()
    workers = keeper.children()
    os.kill(keeper.pid, signal.SIGKILL)
    psutil.wait_procs(workers, timeout=60)  # which end with it
    steps = stepped(host, [s.state for s in steps], ["t2"] * 4, 2)
    assert [s.observation for s in steps] == expected[1]


@each_row("world", [World, LiveWorld])
def test_all_sessions_are_closed_with_the_pool(log, world):
    with RewardPool(workers=1, memory_mb=256) as pool:
        host = hosted(pool, log, world)
        steps = stepped(host, begun(host), ["t1"] * 4)
        processes = {step.info["process"] for step in steps}
    assert sorted(log.read_text().splitlines()[-4:]) == [f"close {name}" for name in NAMES]
    assert not any(psutil.pid_exists(process) for process in processes)
