"""Runs with vLLM servers as actors of Ray, on other nodes than the ranks."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engines import has_ended, needs_vllm
from patience import wait_until
from raylets import open_ray_cluster

from rlx.launch import open_launcher
from rlx.launch.ray_launcher import list_demands, takes_gpus
from rlx.record import find_run_differences
from rlx.spec import RunnerSpec, VllmSamplerSpec

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
BRIEF = {
    "phases.0.steps": 1,
    "phases.1.steps": 1,
    "evaluation.problems": 4,
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
    "runner.max_attempts": 1,
}
POOL = "{engine: vllm, kv_cache_mb: 32, pool: {servers: 2, repeatable: true}}"
DRIFT = 5e-5
"""Nats, as for a pool on the ranks' machine: tests/system/test_vllm_pool.py."""


@pytest.fixture(scope="module")
def cluster():
    with open_ray_cluster() as running:
        yield running


def submitted(home, *arguments, sets):
    done = home.rlx("submit", QUICK, *arguments, sets=sets)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def metrics(home, run_id):
    with home.registry() as registry:
        return registry.results.metrics(run_id)


def find_servers():
    """The actors that have a vLLM worker, by the worker's process."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if "rlx.sampler.vllm_worker" in (process.info["cmdline"] or ()):
            actor = process.parent()
            if actor is not None and "ServerActor" in " ".join(actor.cmdline()):
                found[process] = actor
    return found


@needs_vllm
def test_servers_on_other_nodes_that_are_lost_have_the_numbers_of_one_machine(own_home, cluster):
    """First the process of one, then the node of another; the ranks go on with the same attempt."""
    sets = {**BRIEF, **own_home.held, "runner.ranks": 2, "phases.1.steps": 8, "sampler": POOL}
    here = submitted(own_home, "-q", sets=sets)
    cluster.add_node(bench=1)
    cluster.add_node(bench=1)
    launcher = f"{{kind: ray, address: '{cluster.address}', strategy: SPREAD, "
    launcher += "resources: {CPU: 0.5}, server_resources: {CPU: 0.1, bench: 1}, "
    launcher += "scorers: {count: 1, resources: {CPU: 0.1}}}"
    there = submitted(own_home, "-qd", "--again", sets={**sets, "runner.launcher": launcher})
    servers = wait_until("both servers", lambda: len(found := find_servers()) == 2 and found)
    own_home.until(lambda: own_home.run(there).step >= 1, "a step")
    worker, actor = next(iter(servers.items()))
    actor.send_signal(signal.SIGKILL)
    wait_until("its worker to end", lambda: has_ended(worker))
    wait_until("another actor", lambda: len(find_servers()) == 2)
    step = own_home.run(there).step
    own_home.until(lambda: own_home.run(there).step > step, "a step with it")
    own_home.hold()  # it could be over before the node is missed
    cluster.add_node(bench=1)
    before = {*find_servers()}
    cluster.kill_node(len(cluster.nodes) - 2)
    wait_until("a server to be lost", lambda: any(map(has_ended, before)))
    own_home.release()
    own_home.until(lambda: own_home.run(there).ended, "it to end")
    ended = own_home.run(there)
    assert (ended.status, ended.step) == ("finished", 9), ended.reason
    with own_home.registry() as registry:
        kinds = [event.kind for event in registry.results.events(there)]
        differences = list(find_run_differences(registry, here, there))
    assert "attempt_failed" not in kinds, "Ray started the servers again, and the ranks went on"
    assert differences == []
    found = metrics(own_home, there)
    assert found["sampler/restarts"][-1][1] == 2
    drift = [value for _, value in found["sampler/drift"]]
    assert len(drift) == 9
    assert 0 < max(drift) <= DRIFT
    log = (Path(ended.directory) / "run.log").read_text()
    assert "sampler: vLLM in a pool of 2 servers, on the Ray cluster" in log
    (counts,) = re.findall(r"rows by vLLM server, of this rank: (.*)", log)
    assert min(int(count.replace(",", "")) for count in counts.split(", ")) > 50
    wait_until("every server to end", lambda: not find_servers())


@pytest.mark.parametrize(
    ("on_gpus", "rank", "server"),
    [
        (False, {"CPU": 3}, {"CPU": 6, "odd": 1}),
        (True, {"CPU": 3, "GPU": 1}, {"CPU": 1, "GPU": 2, "odd": 1}),
    ],
)
def test_what_servers_take(on_gpus, rank, server):
    launcher = {"kind": "ray", "server_resources": {"odd": 1}}
    runner = RunnerSpec.model_validate({"threads": 3, "launcher": launcher})
    pool = {"servers": 5, "tensor_parallel": 2}
    sampler = VllmSamplerSpec.model_validate({"engine": "vllm", "pool": pool})
    ranks, servers = list_demands(runner, sampler, on_gpus=on_gpus)
    assert (ranks.kind, ranks.count, ranks.bundle) == ("ranks", 1, rank)
    assert (servers.kind, servers.count, servers.bundle) == ("vLLM servers", 5, server)


@pytest.mark.parametrize(
    ("device", "gpus", "takes"),
    [("cpu", 8, False), ("auto", 0, False), ("auto", 8, True), ("cuda", 0, True)],
)
def test_gpus_are_taken_where_there_are_any(device, gpus, takes):
    nodes = [{"CPU": 4.0}, {"CPU": 4.0, "GPU": gpus}]
    assert takes_gpus(RunnerSpec(device=device), nodes) == takes


ENTER = """
import sys
from contextlib import ExitStack
from pathlib import Path
from rlx.home import RunFolder
from rlx.launch.ray_actor import build_order, enter_run
with ExitStack() as ending:
    folder = enter_run(build_order(RunFolder(Path(sys.argv[1])), {}), ending)
    assert folder.stat().st_mode & 0o777 == 0o700
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_two_actors_of_a_machine_have_folders_of_their_own(tmp_path):
    command = [sys.executable, "-c", ENTER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    actors = [subprocess.Popen(command, **pipes) for _ in range(2)]
    folders = {Path(actor.stdout.readline().strip()) for actor in actors}
    assert len(folders) == 2
    assert all(folder.is_dir() for folder in folders)
    for actor in actors:
        actor.communicate("end")
    assert not any(folder.exists() for folder in folders)


def test_servers_that_a_cluster_cannot_hold_are_refused():
    launcher = {"kind": "ray", "server_resources": {"odd": 1}}
    runner = RunnerSpec.model_validate({"launcher": launcher})
    sampler = VllmSamplerSpec.model_validate({"engine": "vllm", "pool": {}})
    (fault,) = open_launcher(runner, sampler).check()
    assert fault.path == ("runner", "launcher", "server_resources", "odd")
    assert "a cluster with address local has no resource 'odd'" in fault.message
