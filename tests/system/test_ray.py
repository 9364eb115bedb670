"""Runs on a Ray cluster of three nodes, which are raylets of this machine, and on one of their own.

Ray's processes are real. That they are on one machine means that all nodes see the same disk.
"""

import hashlib
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from patience import find_free_port, signal_processes
from pydantic import ValidationError
from raylets import open_ray_cluster

from rlx.launch import list_packages, open_launcher
from rlx.launch.ray_launcher import count_places
from rlx.record import find_run_differences
from rlx.spec import RunnerSpec


@pytest.fixture(scope="module")
def cluster():
    with open_ray_cluster() as running:
        yield running


def find_processes(home, word):
    """Processes of a home with a word on their command lines."""
    found = []
    for pid in home.processes():
        with suppress(psutil.Error):
            if any(word in one for one in psutil.Process(pid).cmdline()):
                found.append(psutil.Process(pid))
    return found


def list_leftovers(home, run_id):
    """Temporary folders of a run, in one of which a cluster of its own is."""
    mark = hashlib.sha256(home.run(run_id).directory.encode()).hexdigest()[:10]
    return list(Path(tempfile.gettempdir()).glob(f"rlx-{mark}-*"))


def read_failures(home, run_id):
    with home.registry() as registry:
        events = registry.results.events(run_id)
        return [event.message for event in events if event.kind == "attempt_failed"]


def test_a_killed_node_is_replaced_and_the_numbers_are_those_of_one_machine(own_home, cluster):
    sets = {**own_home.brief, **own_home.unhurried, **own_home.held, "model.warm_start.steps": 10}
    sets |= {"phases.1.steps": 8, "runner.ranks": 2, "runner.checkpoint": "{every: 1}"}
    here = own_home.rlx("submit", own_home.yaml, "-q", sets=sets)
    assert here.returncode == 0, here.stderr
    spread = f"{{kind: ray, address: '{cluster.address}', strategy: STRICT_SPREAD}}"
    sets |= {"runner.launcher": spread}
    there = own_home.rlx("submit", own_home.yaml, "-qd", "--again", sets=sets)
    assert there.returncode == 0, there.stderr
    first, second = here.stdout.strip(), there.stdout.strip()

    def find_ranks():
        record = own_home.run(second)
        assert record.status in ("submitted", "running"), record.reason
        found = []
        for pid in own_home.ranks(second) if record.step > 1 else ():
            with suppress(psutil.Error):  # it has just ended
                process = psutil.Process(pid)
                found += [process] * ("rlx.launch.rank" in process.cmdline())
        return found

    ranks = own_home.until(find_ranks, "both ranks to train")
    own_home.hold()  # it could be over before its node is missed
    raylets = [rank.parent().ppid() for rank in ranks]
    assert len(set(raylets)) == 2, "they are on two nodes"
    known = [cluster.find_raylet(number) for number in range(len(cluster.nodes))]
    cluster.kill_node(max(map(known.index, raylets)))  # never the head, which is the first
    (reason,) = own_home.until(lambda: read_failures(own_home, second), "the attempt to end")
    own_home.release()
    own_home.until(lambda: own_home.run(second).ended, "it to end")
    assert own_home.run(second).status == "finished", own_home.run(second).reason
    assert "was lost: it crashed, left or cannot be reached" in reason
    with own_home.registry() as registry:
        assert list(find_run_differences(registry, first, second)) == []
    own_home.until(lambda: not own_home.processes(), "every process to end")
    assert not list_leftovers(own_home, second)


def test_a_cluster_of_the_runs_own_ends_with_it_and_leaves_nothing(own_home):
    sets = {**own_home.brief, "runner.launcher": "ray", "seed": 1}
    run = own_home.rlx("submit", own_home.yaml, "-qd", sets=sets).stdout.strip()
    (rank, *_) = own_home.until(lambda: find_processes(own_home, "rlx.launch.rank"), "its rank")
    os.kill(rank.ppid(), signal.SIGKILL)  # its actor
    (reason,) = own_home.until(lambda: read_failures(own_home, run), "the attempt to fail")
    assert "the actor of rank 0 on" in reason and "was killed or crashed" in reason
    own_home.until(lambda: find_processes(own_home, "--node_ip_address"), "the next cluster")
    os.kill(own_home.run(run).pid, signal.SIGKILL)
    own_home.until(lambda: not own_home.processes(), "every process to end")
    assert not list_leftovers(own_home, run)


def test_a_group_fills_the_cluster_and_goes_on_where_it_was_killed(own_home, cluster):
    sets = {**own_home.brief, "model.warm_start.steps": 10}
    alone = own_home.rlx("submit", own_home.yaml, "-q", sets={**sets, "seed": 31})
    assert alone.returncode == 0, alone.stderr
    launcher = f"{{kind: ray, address: '{cluster.address}'}}"
    command = ("submit", own_home.yaml, "--seeds", "30..32", "--group", "fleet")
    sets |= {"runner.launcher": launcher, "runner.checkpoint": "{every: 1}"}

    def runs():
        with own_home.registry() as registry:
            return sorted(registry.runs(group="fleet"), key=lambda run: run.seed)

    group = own_home.begin(*command, sets=sets)
    own_home.until(lambda: sum(run.step > 0 for run in runs()) > 1, "two runs to train")
    own_home.freeze(*(pids := own_home.processes()))
    signal_processes(pids, signal.SIGKILL)
    group.communicate()
    own_home.until(lambda: not own_home.processes(), "every process to end")
    done = own_home.rlx(*command, sets=sets)
    assert done.returncode == 0, done.stderr
    assert [(run.seed, run.status) for run in runs()] == [(s, "finished") for s in (30, 31, 32)]
    with own_home.registry() as registry:
        assert list(find_run_differences(registry, alone.stdout.strip(), runs()[1].id)) == []


NODES = [{"CPU": 4}, {"CPU": 4, "GPU": 2}, {"CPU": 1}]


@pytest.mark.parametrize(
    ("bundle", "strategy", "places"),
    [
        ({"CPU": 1}, "PACK", 9),
        ({"CPU": 2}, "SPREAD", 4),
        ({"CPU": 2}, "STRICT_PACK", 2),
        ({"CPU": 2}, "STRICT_SPREAD", 2),
        ({"CPU": 1, "GPU": 0.5}, "PACK", 4),
        ({"CPU": 1, "odd": 1}, "PACK", 0),
    ],
)
def test_places_of_an_idle_cluster(bundle, strategy, places):
    assert count_places(NODES, bundle, strategy) == places


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        ({"address": "here"}, "launcher.address"),
        ({"resources": {"CPU": 1.5}}, "Ray takes whole numbers above 1"),
        ({"resources": {"CPU": 0}}, "greater than 0"),
        ({"strategy": "STRICT_SPREAD"}, "STRICT_SPREAD needs several nodes"),
    ],
)
def test_settings_that_cannot_be_meant(launcher, reason):
    with pytest.raises(ValidationError, match=reason):
        RunnerSpec.model_validate({"ranks": 2, "launcher": {"kind": "ray", **launcher}})


def test_a_cluster_of_the_runs_own_has_no_other_resources():
    launcher = {"kind": "ray", "resources": {"odd": 1}}
    (fault,) = open_launcher(RunnerSpec.model_validate({"launcher": launcher})).check()
    assert fault.path == ("runner", "launcher", "resources", "odd")
    assert "a cluster with address local has no resource 'odd'" in fault.message


@pytest.mark.parametrize(
    ("launcher", "reasons"),
    [
        ("{kind: ray, address: '127.0.0.1:PORT'}", ["no Ray cluster at", "refused"]),
        ("{kind: ray, address: CLUSTER, resources: {odd: 1}}", ["there is room for 1"]),
    ],
)
def test_what_a_cluster_cannot_do_is_said_at_once(launcher, reasons, own_home, cluster):
    launcher = launcher.replace("PORT", str(find_free_port()))
    launcher = launcher.replace("CLUSTER", f"'{cluster.address}'")
    sets = {"runner.ranks": 2, "runner.launcher": launcher}
    done = own_home.rlx("submit", own_home.yaml, sets=sets)
    for reason in [*reasons, "<override>:"]:
        assert reason in done.stderr
    assert done.returncode == 4


def test_ray_that_is_missing_is_named_with_its_extra(own_home, tmp_path):
    """A folder before the installed packages, which says that rlx wants another Ray."""
    wanted = list_packages()["ray"].range
    info = tmp_path / "ray-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 0.1\n")
    before = own_home.environment["PYTHONPATH"]
    own_home.environment["PYTHONPATH"] = f"{tmp_path}:{before}"
    done = own_home.rlx("submit", own_home.yaml, sets={"runner.launcher": "ray"})
    own_home.environment["PYTHONPATH"] = before
    assert f"needs the package ray{wanted}, found 0.1" in done.stderr
    assert "pip install 'rlx[ray]'" in done.stderr
    assert done.returncode == 4
