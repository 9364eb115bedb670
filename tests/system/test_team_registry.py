"""Runs whose registry is a PostgreSQL server: it is restarted, and its password is seen nowhere."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from postgres import PASSWORD, server

from rlx.launch import find_run_differences
from rlx_registry import Registry


@pytest.fixture(scope="module")
def team():
    with server() as running:
        yield running


@pytest.fixture(scope="module")
def url(team):
    return team.url(team.create())


@pytest.fixture(scope="module")
def home(own_home, url):
    own_home.environment["RLX_REGISTRY"] = url
    return own_home


def begin(home, **named):
    sets = {**home.brief, **named}
    return home.submit("-d", "--again", sets=sets)


def wait(home, url, run_id, condition, what):
    """Waits with a connection of its own each time, for the server may have been restarted."""

    def look():
        with Registry.open(url, read_only=True) as registry:
            return condition(registry.run(run_id))

    return home.until(look, what)


def test_a_server_that_is_restarted_ends_no_run(home, team, url):
    sets = {"phases.1.steps": 6, **home.unhurried, **home.held}
    runs = [begin(home, **sets) for _ in range(2)]
    wait(home, url, runs[1], lambda run: run.step >= 2, "it to train")
    home.hold()  # so that neither is over
    team.stop(signal.SIGQUIT)  # in the middle of whatever is being written
    home.release()
    time.sleep(3)  # scenario: the server is away
    team.start()
    for run_id in runs:
        wait(home, url, run_id, lambda run: run.ended, "it to end")
    with Registry.open(url, read_only=True) as registry:
        assert [registry.run(run_id).status for run_id in runs] == ["finished", "finished"]
        assert list(find_run_differences(registry, *runs)) == []
        assert [registry.run(run_id).attempt for run_id in runs] == [1, 1]
    logs = [Path(log).read_text() for log in home.path.glob("runs/*/run.log")]
    assert any("waiting for the registry" in log or "heartbeat failed" in log for log in logs)


def test_the_password_is_seen_nowhere(home, url):
    run_id = begin(home, seed=1, **home.unhurried)
    wait(home, url, run_id, lambda run: run.step >= 1, "it to train")
    for pid in home.processes():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            assert PASSWORD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    said = [home.rlx(*verb) for verb in (["status", run_id], ["runs"], ["logs", run_id], ["check"])]
    said.append(home.rlx("validate", "--values", home.yaml))
    wait(home, url, run_id, lambda run: run.ended, "it to end")
    assert not any(PASSWORD in done.stdout + done.stderr for done in said)
    home.until(lambda: not home.processes(), "every process to end")
    for folder, _, names in os.walk(home.path):
        for name in names:
            assert PASSWORD.encode() not in Path(folder, name).read_bytes(), name


@pytest.mark.timeout(3600)  # two runs and more
def test_kills_at_random_moments_on_postgresql(home, team):
    fresh = team.url(team.create())
    trial = ("check", home.yaml, "--kills", 1, "--seed", 47, "--registry", fresh)
    done = home.rlx(*trial, sets={**home.small, "evaluation.problems": 4}, seconds=3400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 killed runs have the same numbers as the uninterrupted run" in done.stdout
