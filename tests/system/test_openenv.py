"""OpenEnv through rlx: a server in a process of its own, restarted, busy, slow, and hostile."""

import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from gyms_installed import need_library
from patience import find_free_port

from rlx.plugin import Action
from rlx.reward import PooledHost, RewardPool
from rlx.rollout import HostFault, LocalHost
from rlx.testing import check_environment, check_task
from rlx.testing.rewards import HOSTILE_TEXTS
from rlx_gyms.openenv import OpenEnvEnvironment, OpenEnvTask
from rlx_gyms.remote import RemoteFault

need_library("websockets")

SERVER = Path(__file__).parents[1] / "openenv_server.py"
PLAYER = OpenEnvEnvironment(action="guess", timeout=30.0)


@contextmanager
def serve(*arguments):
    """A server in a process of its own; yields its address."""
    command = [sys.executable, str(SERVER), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url():
    with serve() as address:
        yield address


def build_task(url, **options):
    return OpenEnvTask(url=url, observation="text", timeout=30.0, **options)


def begin(url, environment=PLAYER, index=0, **options):
    problem = build_task(url, **options).problem("train", index, 0)
    host = LocalHost(environment)
    (state,) = host.reset([(problem.fields, 0)])
    return host, state, problem


def guess(host, state, text, number=1):
    (step,) = host.step([(state, Action(text=text, number=number))])
    return step


def test_an_episode_is_played_to_its_end_and_its_seed_decides_it(url):
    ends = set()
    for index in range(4):
        host, state, problem = begin(url, index=index)
        low, high = map(int, re.fullmatch(r"guess (\d+) to (\d+)\n", problem.prompt).groups())
        for number in range(1, 5):
            middle = (low + high) // 2
            step = guess(host, state, str(middle), number)
            if step.done:
                break
            state = step.state
            low, high = (middle + 1, high) if step.observation == "higher\n" else (low, middle - 1)
        won = {"reward": 1.0, "return": 1.0, "valid": True, "even": middle % 2 == 0}
        assert step.info == won
        ends.add(middle)
    assert len(ends) > 1


def test_hostile_turns_are_invalid_or_faults_of_the_server(url):
    host, state, _ = begin(url)
    for text in HOSTILE_TEXTS.values():
        assert guess(host, state, text).kind in ("turn", "invalid")
    assert guess(host, state, "no number").kind == "invalid"
    with pytest.raises(RemoteFault, match="EXECUTION_ERROR"):
        guess(host, state, "99")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("silent", "does not answer `step` within 0.5 s"),
        ("ends", "ended the connection"),
        ("huge", "ended the connection .*1009"),
        ("text", "invalid JSON"),
        ("deep", "invalid JSON"),
        ("list", "sent list"),
        ("no observation", "no observation"),
        ("nan", "NaN"),
        ("infinite", "inf as reward"),
        ("words", "'a lot' as reward"),
    ],
)
def test_a_server_that_misbehaves_is_named(url, fault, says):
    patience = 0.5 if fault == "silent" else 30  # a crowded machine takes longer
    player = PLAYER.model_copy(update={"timeout": patience})
    host, state, _ = begin(url, player, reset={"fault": fault})
    with pytest.raises(RemoteFault, match=rf"127\.0\.0\.1.*{says}"):
        guess(host, state, "5")


def test_a_server_that_drips_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, args=(listening,), daemon=True).start()
        task = OpenEnvTask(url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=1.0)
        with pytest.raises(ValueError, match=r"cannot be reached|not an OpenEnv server"):
            task.check()


def drip(listening):
    connection, _ = listening.accept()
    with connection:
        for byte in b"HTTP/1.1 101 " + b"x" * 200:
            time.sleep(0.05)  # scenario
            try:
                connection.send(bytes([byte]))
            except OSError:
                return


@pytest.mark.parametrize(
    ("environment", "task", "says"),
    [
        ({"action": "gues"}, {}, "no field 'gues'; did you mean 'guess'"),
        ({"action": "guess"}, {"observation": "txt"}, "no field 'txt'; did you mean 'text'"),
    ],
)
def test_fields_that_the_server_does_not_have_are_named(url, environment, task, says):
    problem = OpenEnvTask(url=url, timeout=30.0).problem("train", 0, 0)
    host = LocalHost(OpenEnvEnvironment(**environment))
    with pytest.raises(RemoteFault, match=says):
        (state,) = host.reset([(problem.fields | task, 0)])
        guess(host, state, "5")


def test_a_server_that_is_not_there_is_named_before_a_run():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(ValueError, match=rf"127.0.0.1:{port} cannot be reached"):
        OpenEnvTask(url=f"http://127.0.0.1:{port}", timeout=0.3).check()


def test_an_episode_goes_on_after_the_server_is_restarted():
    where = (4, find_free_port())
    with serve(*where) as url:
        host, state, _ = begin(url)
        first = guess(host, state, "5")
        state = state if first.done else first.state
        expected = guess(host, state, "1", 2)
    with serve(*where):
        again = guess(host, state, "1", 2)
    assert (again.observation, again.info) == (expected.observation, expected.info)


def test_a_server_with_one_session_serves_two_workers():
    with serve(1) as url, RewardPool(2, 2048) as pool:
        task = build_task(url)
        fields = [task.problem("train", index, 0).fields for index in range(6)]
        host = PooledHost(OpenEnvEnvironment(action="guess", timeout=20.0), pool, 30.0)
        states = host.reset([(problem, 0) for problem in fields])
        steps = host.step([(state, Action(text="5")) for state in states])
        assert not [step for step in steps if isinstance(step, HostFault)]


def test_task_and_environment_keep_the_promises(url):
    check_task(build_task(url))
    problem = build_task(url).problem("train", 0, 0)
    check_environment(OpenEnvEnvironment(action="guess"), problems=[problem.fields])
