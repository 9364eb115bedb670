"""Runs on a Ray cluster one of whose nodes does not see the disk of the others.

The node is a raylet of this machine for which another file system hides the home of the runs.
"""

import hashlib
import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from raylets import SEPARATE, open_ray_cluster

from rlx.home import REGISTRY
from rlx.record import find_run_differences


@pytest.fixture(scope="module")
def apart(own_home):
    """The address of a cluster with room for two ranks that take `pair`, one of which, on the node
    with the resource `apart`, does not see the home."""
    found = subprocess.run([*SEPARATE, "true"], check=False, capture_output=True, text=True)
    if found.returncode:
        said = f"file systems cannot be mounted here: {found.stderr.strip()}"
        if os.environ.get("RLX_CI") == "1":
            pytest.fail(said)
        pytest.skip(said)
    own_home.path.mkdir(exist_ok=True)
    with open_ray_cluster() as cluster:
        cluster.add_node(pair=1)
        node = cluster.add_separate_node(own_home.path, pair=1, apart=1)
        try:
            yield cluster.address
        finally:
            node.terminate()
            node.wait()


def find_ranks(home, run_id):
    """Processes of ranks that see the home, and of those that do not."""
    found = [], []
    for rank in psutil.process_iter(["cmdline"]):
        if "rlx.launch.rank" in (command := rank.info["cmdline"] or ()) and command[-1] == run_id:
            with suppress(psutil.Error):
                if str(home.path) in rank.environ()[REGISTRY]:
                    found[not Path(command[-2]).is_relative_to(home.path)].append(rank)
    return found


def list_leftovers(home, run_id):
    mark = hashlib.sha256(home.run(run_id).directory.encode()).hexdigest()[:10]
    return list(Path(tempfile.gettempdir()).glob(f"rlx-{mark}-*"))


def launch(address, resource):
    taken = {"CPU": 0.5, resource: 1}
    return json.dumps({"kind": "ray", "address": address, "resources": taken})


@pytest.fixture(scope="module")
def here(own_home):
    """Settings of a run of two ranks, and the run on this machine."""
    sets = {**own_home.brief, **own_home.unhurried, **own_home.held, "model.warm_start.steps": 10}
    sets |= {"phases.1.steps": 8, "runner.ranks": 2, "runner.checkpoint": "{every: 1}"}
    done = own_home.rlx("submit", own_home.yaml, "-q", sets=sets)
    assert done.returncode == 0, done.stderr
    return sets, done.stdout.strip()


def test_a_rank_without_the_disk_takes_part_and_is_replaced(own_home, apart, here):
    sets, first = here
    sets = {**sets, "runner.launcher": launch(apart, "pair")}
    done = own_home.rlx("submit", own_home.yaml, "-qd", "--again", sets=sets)
    assert done.returncode == 0, done.stderr
    second = done.stdout.strip()

    def find_both():
        record = own_home.run(second)
        assert record.status in ("submitted", "running"), record.reason
        if record.step > 1:
            own_home.hold()  # a search takes as long as many steps
        seeing, blind = find_ranks(own_home, second)
        return blind if record.step > 1 and len(seeing) == len(blind) == 1 else []

    (blind,) = own_home.until(find_both, "a rank on either disk to train")
    os.kill(blind.pid, signal.SIGKILL)
    own_home.release()
    own_home.until(lambda: own_home.run(second).ended, "it to end")
    record = own_home.run(second)
    assert (record.status, record.attempt) == ("finished", 2), record.reason
    with own_home.registry() as registry:
        assert list(find_run_differences(registry, first, second)) == []
    own_home.until(lambda: not any(find_ranks(own_home, second)), "every rank to end")
    own_home.until(lambda: not own_home.processes(), "every process to end")
    assert not list_leftovers(own_home, second)


def test_what_a_rank_without_the_disk_lacks_is_named(own_home, apart, here):
    sets, first = here
    model = Path(own_home.run(first).directory) / "model"
    sets = {path: value for path, value in sets.items() if not path.startswith("model.")}
    sets |= {"model": json.dumps({"kind": "pretrained", "path": str(model)})}
    sets |= {"runner.launcher": launch(apart, "pair")}
    done = own_home.rlx("submit", own_home.yaml, "-q", sets=sets)
    assert done.returncode, done.stdout
    assert str(model) in done.stderr


def test_a_run_needs_one_rank_that_sees_its_folder(own_home, apart, here):
    sets, _ = here
    sets = {**sets, "runner.ranks": 1, "runner.launcher": launch(apart, "apart")}
    done = own_home.rlx("submit", own_home.yaml, "-q", "--again", sets=sets)
    assert done.returncode == 4, done.stderr
    assert "no node with a rank sees" in done.stderr
