"""Runs on a Ray cluster of three nodes, which are raylets of this machine.

Ray's processes are real. That they are on one machine means that all nodes see the same disk.
"""

import hashlib
import os
import re
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from guests import write_distribution
from patience import find_free_port
from pydantic import ValidationError
from raylets import open_ray_cluster

from rlx.launch import list_packages
from rlx.spec import RunnerSpec


@pytest.fixture(scope="module")
def cluster():
    with open_ray_cluster() as running:
        yield running


def list_leftovers(home, run_id):
    """Temporary folders of a run."""
    mark = hashlib.sha256(home.run(run_id).directory.encode()).hexdigest()[:10]
    return list(Path(tempfile.gettempdir()).glob(f"rlx-{mark}-*"))


def read_failures(home, run_id):
    with home.registry() as registry:
        events = registry.results.events(run_id)
        return [event.message for event in events if event.kind == "attempt_failed"]


def test_two_nodes_give_the_numbers_of_one_machine(own_home, cluster):
    spread = f"{{kind: ray, address: '{cluster.address}', strategy: STRICT_SPREAD}}"
    assert own_home.list_differences_to_one_machine(spread) == []


def test_a_killed_node_is_replaced_and_the_numbers_are_those_of_one_machine(own_home, cluster):
    sets = {**own_home.brief, **own_home.unhurried, **own_home.held, "model.warm_start.steps": 10}
    sets |= {"phases.1.steps": 8, "runner.ranks": 2, "runner.checkpoint": "{every: 1}"}
    first = own_home.submit(sets=sets)
    spread = f"{{kind: ray, address: '{cluster.address}', strategy: STRICT_SPREAD}}"
    sets |= {"runner.launcher": spread}
    second = own_home.submit("-d", "--again", sets=sets)

    def find_ranks():
        record = own_home.run(second)
        assert record.status in ("submitted", "running"), record.reason
        return own_home.find("rlx.launch.rank") if record.step > 1 else ()

    ranks = own_home.until(find_ranks, "both ranks to train")
    own_home.hold()  # it could be over before its node is missed
    raylets = [psutil.Process(rank).parent().ppid() for rank in ranks]
    assert len(set(raylets)) == 2, "they are on two nodes"
    known = [cluster.find_raylet(number) for number in range(len(cluster.nodes))]
    cluster.kill_node(max(map(known.index, raylets)))  # never the head, which is the first
    (reason,) = own_home.until(lambda: read_failures(own_home, second), "the attempt to end")
    own_home.release()
    own_home.until(lambda: own_home.run(second).ended, "it to end")
    assert own_home.run(second).status == "finished", own_home.run(second).reason
    assert re.search(r"the (node|actor) of rank \d.* was lost: it", reason)
    assert own_home.differences(first, second) == []
    own_home.until(lambda: not own_home.processes(), "every process to end")
    assert not list_leftovers(own_home, second)


def test_a_killed_driver_leaves_nothing_and_the_run_goes_on(own_home, cluster):
    launcher = f"{{kind: ray, address: '{cluster.address}'}}"
    sets = {**own_home.long, "runner.launcher": launcher, "runner.checkpoint": "{every: 1}"}
    run = own_home.submit("-d", sets=sets)
    own_home.until(lambda: own_home.run(run).step > 1, "it to train")
    (driver,) = own_home.find("rlx.launch.ray_ranks")
    os.kill(driver, signal.SIGKILL)
    (reason,) = own_home.until(lambda: read_failures(own_home, run), "the attempt to fail")
    assert "the process that starts the ranks was killed by signal 9" in reason
    step = own_home.run(run).step
    own_home.until(lambda: own_home.run(run).step > step, "it to go on")
    os.kill(own_home.run(run).pid, signal.SIGKILL)
    own_home.until(lambda: not own_home.processes(), "every process to end")
    assert not list_leftovers(own_home, run)


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        ({"address": "http://head:8265"}, "launcher.address"),
        ({"address": "local"}, "launcher.address"),
    ],
)
def test_settings_that_cannot_be_meant(launcher, reason):
    with pytest.raises(ValidationError, match=reason):
        RunnerSpec.model_validate({"ranks": 2, "launcher": {"kind": "ray", **launcher}})


def test_a_cluster_that_does_not_answer_is_said_at_once(own_home):
    address = f"127.0.0.1:{find_free_port()}"
    sets = {"runner.launcher": f"{{kind: ray, address: '{address}'}}"}
    done = own_home.rlx("submit", own_home.yaml, sets=sets)
    assert f"no Ray cluster at {address}" in done.stderr and "<override>:" in done.stderr
    assert done.returncode == 4


def test_ray_that_is_missing_is_named_with_its_extra(own, tmp_path):
    """A folder before the installed packages, which says that rlx wants another Ray."""
    wanted = list_packages()["ray"].range
    write_distribution(tmp_path / "old", "ray", version="0.1")
    own.add_path(tmp_path / "old")
    done = own.rlx("submit", own.yaml, sets={"runner.launcher": "ray"})
    assert f"needs the package ray{wanted}, found 0.1" in done.stderr
    assert "pip install 'rlx[ray]'" in done.stderr
    assert done.returncode == 4
